"""`octavo bench --workload`: its batches, its figures, and the command on a tiny model on the CPU."""

import io
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_cases import WorkerHere, preset

from octavo.tools.bench import runner
from octavo.tools.bench.check import check
from octavo.tools.bench.contenders import Contender
from octavo.tools.bench.prepared_model import PreparedModel
from octavo.tools.bench.result import missing_row, new_row
from octavo.tools.bench.table import workload_markdown
from octavo.tools.bench.timing import StepClock
from octavo.tools.bench.worker import Worker, serve
from octavo.tools.bench.workload import LENGTHS, Workload, make_batches, make_documents
from octavo.tools.bench.workload_result import add_workload_figures, describe_batches

pytest.importorskip("transformers")
SHORT = ["--preset", "tiny", "--layers", "1", "--device", "cpu", "--steps", "4", "--warmup", "1", "--no-compile"]
PADDED, PACKED = Workload("padded"), Workload("packed")
Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(invoke: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(runner, "WorkerProcess", WorkerHere)
    return lambda *arguments: invoke("bench", *SHORT, *arguments)


def read(folder: Path, pattern: str) -> dict:
    (path,) = folder.glob(pattern)
    return json.loads(path.read_text())


def test_lengths():
    case = preset("8b", seq=2048)
    lengths = {
        name: [len(document) for document in make_documents(case, Workload("padded", name), 4000)] for name in LENGTHS
    }
    uniform, lognormal = lengths["uniform"], lengths["lognormal"]
    assert set(lengths["full"]) == {2048}
    assert 200 <= min(uniform) < 210 and 2040 < max(uniform) <= 2048
    assert statistics.mean(uniform) == pytest.approx((200 + 2048) / 2, rel=0.03)
    assert statistics.median(lognormal) == pytest.approx(400, rel=0.05)
    assert max(lognormal) == 2048 and 0.01 < sum(length == 2048 for length in lognormal) / 4000 < 0.03
    shorter = [len(document) for document in make_documents(replace(case, seq=512, tokens=512), PADDED, 4000)]
    assert statistics.median(shorter) == pytest.approx(100, rel=0.05) and max(shorter) == 512
    assert min(len(document) for document in make_documents(preset("tiny", seq=4, tokens=4), PADDED, 200)) == 2


def test_padded_batches_are_those_of_a_collator():
    case = preset("tiny")
    for batch in make_batches(case, PADDED, 5):
        ids, mask, labels = (batch.inputs[name] for name in ("input_ids", "attention_mask", "labels"))
        lengths = mask.sum(1).tolist()
        assert ids.shape == (4, max(lengths)) and batch.tokens == sum(lengths) and batch.size == ids.numel()
        for row, length in enumerate(lengths):
            assert mask[row, :length].all() and torch.equal(labels[row, :length], ids[row, :length])
            assert (labels[row, length:] == -100).all() and not mask[row, length:].any()


def test_packed_batches_are_one_full_row():
    case = preset("tiny")
    batches = make_batches(case, PACKED, 5)
    for batch in batches:
        ids, positions, labels = (batch.inputs[name] for name in ("input_ids", "position_ids", "labels"))
        assert ids.shape == positions.shape == labels.shape == (1, 256) and batch.tokens == 256
        starts = (positions == 0).nonzero()[:, 1]
        assert set(range(0, 256, 64)) <= set(starts.tolist())  # a document ends where its row does
        assert ((positions.diff() == 1) | (positions[:, 1:] == 0)).all()
        assert (labels[positions == 0] == -100).all()
        assert torch.equal(labels[positions > 0], ids[positions > 0])
    counts = {int((batch.inputs["position_ids"] == 0).sum()) for batch in batches}
    assert len(counts) > 1


@pytest.mark.parametrize("workload", [PADDED, PACKED], ids=lambda workload: workload.name)
def test_batches_come_from_the_seed(workload):
    case = preset("tiny")
    first, again, longer = (make_batches(case, workload, count) for count in (3, 3, 6))
    other = make_batches(replace(case, seed=1), workload, 3)
    for i in range(3):
        for name, x in first[i].inputs.items():
            assert torch.equal(x, again[i].inputs[name]) and torch.equal(x, longer[i].inputs[name])
    assert not torch.equal(first[0].inputs["input_ids"].flatten()[:4], other[0].inputs["input_ids"].flatten()[:4])


def test_padding_and_new_lengths_are_counted():
    batches = make_batches(preset("tiny"), PADDED, 8)
    actual = describe_batches([*batches[:4], *batches[2:4], *batches[6:]], 2)
    timed = [*batches[2:4], *batches[2:4], *batches[6:]]
    real = sum(int(batch.inputs["attention_mask"].sum()) for batch in timed)
    assert actual["tokens"] == real == sum(actual["real_tokens"])
    assert actual["real_tokens"] == [int(batch.inputs["attention_mask"].sum()) for batch in timed]
    assert actual["padding"] == pytest.approx(1 - real / sum(b.inputs["labels"].numel() for b in timed))
    lengths = [batch.inputs["input_ids"].shape[1] for batch in batches]
    assert actual["batches"] == [[4, batch.inputs["input_ids"].shape[1]] for batch in timed]
    assert actual["new_lengths"] == len({*lengths[2:4], *lengths[6:]} - set(lengths[:2]))


def test_padded_batches(bench, tmp_path):
    code, output, error = bench("--workload", "padded", "--against", "bf16-eager,bf16-compiled,octavo-bf16,te")
    assert code == 0, error
    assert "rows padded to the longest, lognormal lengths up to 64" in output and "real tokens/s" in output
    assert "padding computed" not in output
    result = read(tmp_path, "20??-??-??-cpu-tiny-1l-padded-lognormal.json")
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["bf16-eager", "octavo-bf16", "octavo delayed", "bf16-compiled", "te"]
    batches = make_batches(preset("tiny"), PADDED, 5)[1:]
    tokens = sum(batch.tokens for batch in batches)
    assert result["kind"] == "padded" and result["workload"]["tokens"] == tokens
    assert result["workload"]["padding"] > 0.1 and "flops" not in result
    assert result["command"].startswith("octavo bench --preset tiny") and result["versions"]["torch"]
    for name in ("bf16-eager", "octavo-bf16", "octavo delayed"):
        row, figures = rows[name], rows[name]["figures"]
        (turn,) = row["turns"]
        assert len(turn["times"]) == 4 and row["check"]["cosine"] > 0.95 and not row["compile"]
        assert figures["tokens_per_s"] == pytest.approx(tokens / sum(turn["times"]))
        assert figures["slowest_s"] == turn["times"][3] and figures["whole_s"] > figures["total_s"]
        assert figures["loss"] == pytest.approx(rows["bf16-eager"]["figures"]["loss"], rel=2e-3)
        assert turn["padded_calls"] == {}
    assert rows["octavo-bf16"]["check"]["cosine"] > 0.999
    assert "te" in rows and rows["bf16-compiled"]["reason"] == "left out by --no-compile"


def test_packed_batches_with_adapters(bench, tmp_path):
    lora = ("--mode", "lora", "--rank", "4", "--recipe", "channel", "--against", "bf16-eager,peft")
    code, output, error = bench("--workload", "packed", "--lengths", "uniform", *lora)
    assert code == 0, error
    assert "4 rows of 64 packed into one, uniform lengths" in output
    result = read(tmp_path, "*-cpu-tiny-1l-lora4-packed-uniform.json")
    rows = {row["name"]: row for row in result["rows"]}
    assert result["workload"]["padding"] == 0 and result["workload"]["tokens"] == 4 * 256
    assert "adapters in FP32" in rows["peft"]["summary"] and rows["peft"]["check"]["cosine"] > 0.999
    speeds = [rows[name]["figures"]["tokens_per_s"] for name in ("octavo channel", "peft", "bf16-eager")]
    figures = rows["octavo channel"]["figures"]
    assert figures["speedup_peft"] == pytest.approx(speeds[0] / speeds[1])
    assert figures["speedup_bf16"] == figures["speedup_bf16-eager"] == pytest.approx(speeds[0] / speeds[2])


def test_the_stock_trainer(bench, tmp_path, monkeypatch):
    from octavo.tools.bench import trainer_run

    seen = []
    plain = trainer_run.pad
    monkeypatch.setattr(trainer_run, "pad", lambda documents: seen.append(plain(documents)) or seen[-1])
    code, output, error = bench("--workload", "trainer", "--against", "bf16-eager", "--recipe", "delayed")
    assert code == 0, error
    assert "stock Trainer, 4 rows padded to the longest" in output and "forward + backward + optimiser" in output
    assert "padding computed" not in output
    expected = make_batches(preset("tiny"), Workload("trainer"), 5)
    assert len(seen) == 2 * 5  # by both contenders, in order
    for batch, other in zip(seen, expected * 2, strict=True):
        assert all(torch.equal(x, other.inputs[name]) for name, x in batch.inputs.items())
    rows = {row["name"]: row for row in read(tmp_path, "*-trainer-lognormal.json")["rows"]}
    losses = [row["figures"]["loss"] for row in rows.values()]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3) and losses[0] != losses[1]
    assert [len(row["turns"][0]["times"]) for row in rows.values()] == [4, 4]


def test_trl_trains_on_the_same_batches(bench, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    from trl.trainer import sft_trainer

    seen = []
    collator = sft_trainer.DataCollatorForLanguageModeling
    plain = collator.torch_call
    monkeypatch.setattr(collator, "torch_call", lambda self, samples: seen.append(plain(self, samples)) or seen[-1])
    lora = ("--mode", "lora", "--rank", "4", "--recipe", "channel", "--against", "peft")
    code, output, error = bench("--workload", "sft", "--lengths", "uniform", *lora)
    assert code == 0, error
    assert "TRL's SFTTrainer, 4 rows padded to the longest" in output and "forward + backward + optimiser" in output
    assert "padding computed" not in output
    expected = make_batches(preset("tiny"), Workload("sft", "uniform"), 5)
    assert len(seen) == 2 * 5
    for batch, other in zip(seen, expected * 2, strict=True):
        for name in ("labels", "attention_mask"):
            assert torch.equal(batch[name], other.inputs[name])
    peft, ours = read(tmp_path, "*-lora4-sft-uniform.json")["rows"]
    assert peft["figures"]["loss"] == pytest.approx(ours["figures"]["loss"], rel=2e-3)
    assert ours["figures"]["loss"] != peft["figures"]["loss"]
    assert ours["figures"]["speedup_peft"] > 0 and len(ours["turns"][0]["times"]) == 4


def test_without_trl_there_is_no_sft(invoke, monkeypatch):
    monkeypatch.setattr("octavo.tools.bench.contenders.find_spec", lambda name: None if name == "trl" else object())
    code, _, error = invoke("bench", "--preset", "tiny", "--workload", "sft", "--against", "none")
    assert code == 2 and "trl is not installed: pip install trl" in error and error.count("\n") == 1


def test_batches_of_one_length_against_nobody(bench, tmp_path):
    code, _, error = bench("--workload", "padded", "--lengths", "full", "--against", "none", "--recipe", "delayed")
    assert code == 0, error
    result = read(tmp_path, "*-padded-full.json")
    (row,) = result["rows"]
    assert row["name"] == "octavo delayed" and row["figures"]["speedup_bf16"] is None
    assert result["workload"]["padding"] == 0 and result["workload"]["new_lengths"] == 0
    assert result["workload"]["real_tokens"] == [256] * 4


@pytest.mark.parametrize(("lengths", "dynamic"), [("uniform", True), ("full", None)])
def test_code_is_dynamic_where_lengths_change(monkeypatch, lengths, dynamic):
    seen = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda _module, **options: seen.append(options["dynamic"]))
    PreparedModel(preset("tiny"), Contender("bf16-compiled", "bf16", True), workload=Workload("padded", lengths))
    assert seen == [dynamic] * 2


def test_the_trainer_loss_is_of_the_last_steps():
    from octavo.tools.bench.trainer_run import train

    contender = Contender("bf16-eager", "bf16", False)
    losses = []
    for last in (1, 2):
        prepared = PreparedModel(preset("tiny", layers=1), contender)
        seen = []
        prepared.model.register_forward_hook(lambda *args, seen=seen: seen.append(args[2].loss.item()))
        losses.append(train(prepared, contender, Workload("trainer"), StepClock("cpu"), warmup=1, steps=4, last=last))
        assert losses[-1] == pytest.approx(statistics.mean(seen[-last:]), abs=1e-3)
        assert len(seen) == 5
    assert losses[0] != losses[1]


def test_a_leak_between_packed_documents_is_caught(monkeypatch):
    case, contender = preset("tiny"), Contender("octavo-bf16", "octavo-bf16", False)
    assert check(case, contender, PACKED)[0]["failure"] == ""
    step = PreparedModel.step

    def leaking(self, inputs=None):
        if "BF16, nothing converted" not in self.summary:
            self.inputs.pop("position_ids", None)
        return step(self, inputs)

    monkeypatch.setattr(PreparedModel, "step", leaking)
    assert "gradient cosine" in check(case, contender, PACKED)[0]["failure"]


def test_computed_padding_is_reported(bench, monkeypatch):
    monkeypatch.setattr("octavo.decoders.ragged.why_padded", lambda _model, _kwargs: "of this test")
    code, output, error = bench("--workload", "padded", "--against", "octavo-bf16", "--recipe", "delayed")
    assert code == 0, error
    assert "octavo-bf16: padding computed in 5 calls: of this test" in output


def test_a_worker_is_told_its_workload():
    case, contender = preset("tiny", layers=1), Contender("bf16-eager", "bf16", False)
    first = {"case": case.to_dict(), "contender": contender.to_dict(), "workload": PADDED.to_dict()}
    lines = [first, {"do": "start"}, {"do": "check"}, {"do": "run", "warmup": 1, "steps": 2}]
    answers = io.StringIO()
    serve(io.StringIO("".join(json.dumps(line) + "\n" for line in lines)), answers)
    started, checked, ran = map(json.loads, answers.getvalue().splitlines())
    assert started == {} and checked["failure"] == "" and len(ran["times"]) == 2
    assert checked["tokens"] == make_batches(case, PADDED, 1)[0].size


@pytest.mark.parametrize(("kind", "rows"), [("octavo-bf16", [(1, 64)]), ("bf16", [(4, 42)])])
def test_layers_start_with_the_shapes_that_they_are_timed_with(monkeypatch, kind, rows):
    """Ours see real tokens alone, and that only if they are asked for a loss."""
    seen = []
    build = PreparedModel._prepare

    def prepare(self, contender):
        build(self, contender)
        mlp = self.model.model.layers[0].mlp.down_proj
        mlp.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[:-1])))

    monkeypatch.setattr(PreparedModel, "_prepare", prepare)
    monkeypatch.setattr("octavo.decoders.ragged.is_watched", lambda _decoder: "")
    Worker(preset("tiny"), Contender("x", kind, False), PADDED).start()
    assert seen == rows


def made_up(name: str, times: list[float], gib: float, optimizer: str | None = None, kind: str = "bf16") -> dict:
    row = new_row(Contender(name, kind, name != "bf16-eager", optimizer=optimizer))
    row["turns"] = [{"times": times, "whole_s": 20.0, "peak_bytes": int(gib * 2**30), "loss": 11.8, "padded_calls": {}}]
    return row


def test_figures_of_a_made_up_run():
    rows = [
        made_up("bf16-eager", [9.0, 1.0, 1.0, 1.0, 2.0], 30.0),
        made_up("bf16-compiled", [1.0, 1.0, 1.0, 1.0, 3.0], 20.0),
        made_up("octavo-bf16 adamw4bit", [1.0] * 5, 12.0, "adamw4bit", "octavo-bf16"),
        made_up("octavo delayed adamw4bit", [0.9, 0.5, 0.4, 0.4, 0.6], 10.0, "adamw4bit", "octavo"),
    ]
    add_workload_figures(rows, [100, 200, 300, 400, 400])
    eager, compiled, own, mine = (row["figures"] for row in rows)
    assert (eager["tokens_per_s"], compiled["tokens_per_s"]) == (100.0, 200.0)
    assert (eager["slowest_s"], eager["step_s"], eager["total_s"]) == (2.0, 1.0, 14.0)
    # Milliseconds for a token, of `own`: 10, 5, 3.3, 2.5, 2.5. The fourth and fifth are settled, the median is of all.
    assert own["slowest_per_token"] == pytest.approx(0.75) and eager["slowest_per_token"] == pytest.approx(1.0)
    assert mine["tokens_per_s"] == pytest.approx(500.0)
    assert mine["speedup_bf16"] == mine["speedup_bf16-compiled"] == pytest.approx(2.5)  # the faster one
    assert mine["speedup_bf16-eager"] == pytest.approx(5.0) and mine["speedup_peft"] is None
    assert mine["speedup_octavo-bf16"] == pytest.approx(500 / 280) and own["speedup_octavo-bf16"] == 1.0
    assert mine["memory_bf16"] == pytest.approx(0.5) and eager["memory_bf16"] == pytest.approx(1.5)

    result = {
        "kind": "padded",
        "date": "2026-11-16",
        "device": "NVIDIA H200",
        "versions": {"torch": "2.11.0"},
        "command": "octavo bench --preset tiny --workload padded",
        "case": preset("tiny").to_dict(),
        "workload": {"name": "padded", "lengths": "uniform", "padding": 0.45, "new_lengths": 5},
        "steps": 5,
        "rows": [*rows, missing_row("torchao", "not installed")],
    }
    lines = workload_markdown([result]).splitlines()
    assert "45% padding, 5 new shapes in 5 steps; forward + backward + optimiser**: NVIDIA H200" in lines[0]
    assert {line.count("|") for line in lines[2:]} == {9}
    assert "| octavo delayed adamw4bit, compiled | 500 | 2.50x | 1.79x | 500.0 | 600.0 | 10.0 | 11.8000 |" in lines
    assert lines[-1].startswith("| torchao | not run: not installed |")


def test_a_clock_counts_what_happens_between_steps(monkeypatch):
    now = iter([0.0, 5.0, 6.0, 8.5])
    monkeypatch.setattr("octavo.tools.bench.timing.time.perf_counter", lambda: next(now))
    clock = StepClock("cpu")
    clock.mark()
    clock.start()  # forgets what came before
    clock.mark()
    clock.mark()
    assert clock.seconds() == [1.0, 2.5] and clock.peak_bytes() is None


def test_ours_are_compiled_only_if_asked():
    from octavo.tools.bench.contenders import default_against, make_contenders

    options = {"recipes": ["delayed"], "head": "bf16", "wgrad": "recipe"}
    case = preset("tiny")
    against = [name for name in default_against(case, "padded") if name != "torchao"]
    actual, _ = make_contenders(case, **options, against=against, compile=True, compile_ours=False, workload="padded")
    assert {c.name: c.compile for c in actual} == {
        "bf16-eager": False,
        "bf16-compiled": True,
        "octavo-bf16": False,
        "octavo delayed": False,
    }
    actual, _ = make_contenders(case, **options, against=["octavo-bf16"], compile=True, workload="padded")
    assert all(contender.compile for contender in actual)
    assert "peft" not in default_against(case, "fixed") and "te" in default_against(case, "fixed")
    assert default_against(preset("tiny", mode="lora"), "packed")[-1] == "peft"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "ragged"], ["workload='ragged'", "padded, packed, trainer"]),
        (["--workload", "padded", "--lengths", "normal"], ["lengths='normal'", "lognormal, uniform"]),
        (["--lengths", "uniform"], ["--lengths uniform", "--workload padded"]),
        (["--workload", "padded", "--rounds", "2"], ["--rounds 2", "--steps"]),
        (["--workload", "padded", "--steps", "0"], ["steps=0"]),
        (["--workload", "packed", "--gemm"], ["--workload packed", "--gemm times parts"]),
        (["--workload", "trainer", "--optimizer", "adamw"], ["--optimizer adamw", "Trainer brings AdamW"]),
        (["--workload", "padded", "--mode", "lora", "--rank", "0"], ["--rank 0", "give a rank"]),
        (["--workload", "padded", "--recipe", "delayed+graphs", "--device", "cpu"], ["delayed+graphs", "GPU"]),
        (["--preset", "bdh-tiny", "--workload", "padded"], ["--workload padded", "BDH", "leave it out"]),
    ],
)
def test_a_bad_request_is_one_line(invoke, arguments, words):
    code, _, error = invoke("bench", *(["--preset", "tiny"] if "--preset" not in arguments else []), *arguments)
    assert code == 2 and error.startswith("octavo: ") and error.count("\n") == 1
    for word in words:
        assert word in error, error
