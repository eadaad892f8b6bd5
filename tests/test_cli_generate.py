"""`octavo generate`, `octavo train --resume --steps`, and help that imports nothing heavy."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli import SMALL, assert_one_line, rows

from octavo.cli.bench import AGAINST, OPTIMIZERS, PRESETS
from octavo.cli.options import GRANULARITIES, RECIPES, in_words
from octavo.numerics.config import RECIPES as ALL_RECIPES
from octavo.numerics.quantize import GRANULARITIES as ALL_GRANULARITIES
from octavo.optim import OPTIMIZERS as ALL_OPTIMIZERS
from octavo.tools.bench.contenders import AGAINST as ALL_AGAINST
from octavo.tools.shapes import PRESETS as ALL_PRESETS

Invoke = Callable[..., tuple[int, str, str]]
TRAIN = ("train", "--steps", "4", "--out", "run", *SMALL)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"abcdefgh\n" * 300)
    return path


def test_it_writes_what_the_model_has_learnt(invoke: Invoke, text: Path) -> None:
    learning = ("--lr", "0.03", "--precision", "fp32", "--dim", "32", "--neurons", "64")
    assert invoke(*TRAIN, "--data", str(text), *learning, "--steps", "60")[0] == 0
    code, output, error = invoke("generate", "run", "--prompt", "abcd", "--bytes", "14", "--temperature", "0")
    assert (code, error) == (0, "")
    assert output == "From run/model.safetensors\nabcdefgh\nabcdefgh\n\n"
    first, again, other = (
        invoke("generate", "run", "--bytes", "30", "--temperature", "3", "--seed", seed)[1] for seed in "112"
    )
    assert first == again != other


def test_a_run_on_its_way_has_its_checkpoint(invoke: Invoke, text: Path) -> None:
    assert invoke(*TRAIN, "--data", str(text))[0] == 0
    finished = invoke("generate", "run", "--bytes", "20")[1]
    Path("run/model.safetensors").unlink()
    code, output, _ = invoke("generate", "run", "--bytes", "20")
    assert code == 0 and output.startswith("From run/checkpoint-000004\n")
    assert output.split("\n", 1)[1] == finished.split("\n", 1)[1]


@pytest.mark.parametrize(
    ("damage", "arguments", "words", "expected"),
    [
        (None, ["nowhere"], ["nowhere holds no run of Octavo", "octavo train"], 2),
        (None, ["run", "--bytes", "0"], ["bytes=0"], 2),
        (None, ["run", "--temperature", "-1"], ["temperature=-1"], 2),
        (None, ["run", "--device", "tpu"], ["device='tpu'", "auto, cpu, cuda"], 2),
        ("model.safetensors", ["run"], ["model.safetensors cannot be read", "--resume"], 1),
        ("config.json", ["run"], ["config.json cannot be read"], 1),
    ],
)
def test_what_it_cannot_do_is_one_line(
    invoke: Invoke, text: Path, damage: str | None, arguments: list[str], words: list[str], expected: int
) -> None:
    assert invoke(*TRAIN, "--data", str(text), "--steps", "1")[0] == 0
    if damage:
        Path("run", damage).write_bytes(b"no")
    code, output, error = invoke("generate", *arguments)
    assert_one_line(error, *words)
    assert code == expected and output == ""


def test_a_model_that_has_diverged_is_one_line(invoke: Invoke, text: Path) -> None:
    assert invoke(*TRAIN, "--data", str(text), "--lr", "1e30", "--warmup", "0")[0] == 1
    code, _, error = invoke("generate", "run")
    assert_one_line(error, "not finite", "diverged")
    assert code == 1


def test_a_finished_run_is_extended(invoke: Invoke, text: Path) -> None:
    assert invoke(*TRAIN, "--data", str(text))[0] == 0
    code, output, error = invoke("train", "--resume", "--out", "run", "--steps", "7")
    assert code == 0, error
    assert "Extending a run of 4 steps to 7" in output and len(rows(Path("run"))) == 7


def test_help_does_not_wait_for_torch() -> None:
    """Its import takes seconds; without it, help takes a fifth of one."""
    code = """
import sys
sys.argv = ["octavo", *sys.argv[1:]]
from octavo.cli import main
try:
    main()
except SystemExit as leaving:
    assert leaving.code in (0, None), leaving.code
heavy = {"torch", "numpy", "transformers", "safetensors"} & set(sys.modules)
assert not heavy, heavy
"""
    for arguments in (
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in ("train", "generate", "plan", "bench")),
    ):
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.DEVNULL)


def test_help_names_what_there_is() -> None:
    assert set(PRESETS) == set(ALL_PRESETS) and OPTIMIZERS == ALL_OPTIMIZERS
    assert set(AGAINST) == set(ALL_AGAINST)
    assert tuple(ALL_RECIPES) == RECIPES and tuple(ALL_GRANULARITIES) == GRANULARITIES
    assert in_words(GRANULARITIES) == "tensor, channel, block or mx"
