"""What a run promises about its figures and files, each checked by another way than the run's own: what is held out,
and what is on the disk before it counts."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import rows, run
from safetensors import safe_open
from torch.nn import functional as F

from octavo.models import BDH, BDHConfig
from octavo.tools.html_report import write_report


def load_model(folder: Path) -> BDH:
    with safe_open(folder / "model.safetensors", "pt") as file:
        model = BDH(BDHConfig(**json.loads(file.metadata()["bdh"])))
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return model.eval()


@torch.no_grad()
def loss_on(model: BDH, content: bytes, starts: list[int], length: int) -> float:
    windows = torch.tensor([list(content[start : start + length + 1]) for start in starts])
    logits = model(windows[:, :-1])[0]
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


def test_held_out_loss_is_that_of_the_end_of_the_data(make_settings: Any, text: Path) -> None:
    """The last tenth of the file is of other bytes than the rest: there the model is worse than a guess."""
    seen, unseen = b"def hatch(egg):\n    return egg.dragon\n" * 100, bytes(range(128, 208)) * 5
    content = seen[: 9 * len(unseen)] + unseen
    text.write_bytes(content)
    options = {"held_out": 0.1, "steps": 30, "lr": 0.03, "evaluation_batches": 3}
    settings = make_settings(precision="fp32", dropout=0.3, **options)  # dropout: of training alone
    result = run(settings, text.parent / "run").results["fp32"]
    model, size, count = load_model(text.parent / "run"), len(unseen), settings.evaluation_batches * settings.batch
    last = size - settings.seq - 1
    starts = [len(content) - size + i * last // (count - 1) for i in range(count)]
    assert result.held_out_loss == pytest.approx(loss_on(model, content, starts, settings.seq), rel=1e-5)
    losses = [row["loss"] for row in rows(text.parent / "run")]
    assert result.final_loss == pytest.approx(sum(losses[-3:]) / 3)  # the last tenth of 30
    assert result.held_out_loss > 5.5 > 4 > result.final_loss
    summary = json.loads((text.parent / "run" / "summary.json").read_text())
    assert summary["fp32"]["held_out_loss"] == result.held_out_loss


def test_training_never_reads_what_is_held_out(make_settings: Any, text: Path) -> None:
    """Other held-out bytes: the same curve, to the bit. One other byte before them: another one."""
    content = text.read_bytes()[:200]
    models = []
    for place in (None, 199, 160, 159):  # held out: the last 40 of 200
        changed = bytearray(content)
        if place is not None:
            changed[place] ^= 255
        text.write_bytes(changed)
        name = f"run{place}"
        # Every offset is drawn: the last byte that is trained on is in some window.
        run(make_settings(precision="fp32", held_out=0.2, steps=20, batch=16), text.parent / name)
        models.append((text.parent / name / "model.safetensors").read_bytes())
    assert models[0] == models[1] == models[2] != models[3]


class Disk:
    """Watches what is forced to the disk, and what is renamed, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forced: dict[str, int] = {}  # path: its size when it was forced last
        self.waiting: set[str] = set()  # folders with a new name that is not forced yet
        self.renamed: list[str] = []
        fsync = os.fsync

        def forced(descriptor: int) -> None:
            fsync(descriptor)
            path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            self.forced[path] = os.fstat(descriptor).st_size
            self.waiting.discard(path)

        monkeypatch.setattr(os, "fsync", forced)
        for name in ("rename", "replace"):
            monkeypatch.setattr(Path, name, self._checked(getattr(Path, name)))

    def _checked(self, call: Any) -> Any:
        def rename(source: Path, target: Path) -> Path:
            source, target = source.absolute(), Path(target).absolute()
            if not target.name.endswith(".tmp"):  # a checkpoint on its way out needs no forcing
                assert not self.waiting, f"the new name before {target.name} was not forced to the disk"
                self.check(source)
                self.renamed.append(target.name)
                if target.name.startswith("checkpoint-"):  # its rows come before it
                    folder = target.parent.parent if target.parent.name == "bf16" else target.parent
                    self.check(folder / ("metrics_bf16.jsonl" if target.parent.name == "bf16" else "metrics.jsonl"))
                self.waiting.add(str(target.parent))
            return call(source, target)

        return rename

    def check(self, path: Path) -> None:
        for each in [path, *path.rglob("*")] if path.is_dir() else [path]:
            assert str(each) in self.forced, f"{each} is renamed before it is on the disk"
            assert each.is_dir() or self.forced[str(each)] == each.stat().st_size, f"{each} grew after it was forced"


def test_everything_is_on_the_disk_before_it_gets_its_name(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    run(make_settings(compare=True, steps=4), tmp_path / "run")
    write_report(tmp_path / "run")
    assert not disk.waiting, "a new name was never forced to the disk"
    assert set(disk.renamed) == {
        *("checkpoint-000003", "checkpoint-000004", "config.json", "metrics.jsonl", "metrics_bf16.jsonl"),
        *("model.safetensors", "products.json", "report.html", "sample.json", "summary.json"),
    }
