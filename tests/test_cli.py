"""The command line: its first lines, its exit codes, one line for every error and never a traceback."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from commands import Command

OCTAVO = Path(sys.executable).with_name("octavo")
SMALL = [
    *(
        "--dim",
        "16",
        "--heads",
        "2",
        "--neurons",
        "32",
        "--layers",
        "1",
        "--batch",
        "2",
        "--seq",
        "24",
        "--warmup",
        "2",
    ),
    *("--save-interval", "3", "--log-interval", "2", "--evaluation-batches", "1", "--sample-bytes", "5"),
    *("--device", "cpu"),
]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # products this small only lose by being shared

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"All happy families are alike; each unhappy family is unhappy in its own way.\n" * 40)
    return path


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder)]


def assert_one_line(error: str, *words: str) -> None:
    assert error.startswith("octavo: ") and error.count("\n") == 1, error
    for word in words:
        assert word in error, error


def test_a_run_through_the_installed_command(text: Path, tmp_path: Path) -> None:
    command = [OCTAVO, "train", "--data", str(text), "--steps", "6", *SMALL]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    output = result.stdout.splitlines()
    assert output[:2] == ["FP8 training enabled with format: hybrid", "Using device: cpu with dtype torch.float32"]
    assert output[-1] == "Report: runs/bdh-custom-001/report.html"
    assert sorted(path.name for path in (tmp_path / "runs" / "bdh-custom-001").iterdir()) == [
        "checkpoint-000003",
        "checkpoint-000006",
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "octavo-run.json",
        "products.json",
        "report.html",
        "sample.json",
        "summary.json",
    ]


def test_comparison(invoke: Invoke, text: Path) -> None:
    code, output, _ = invoke("train", "--data", str(text), "--steps", "4", "--compare", "--out", "run", *SMALL)
    assert code == 0
    assert "FP8's final loss is" in output and "FP8's held-out loss is" in output
    assert len(rows(Path("run"))) == 4 and Path("run/metrics_bf16.jsonl").exists()


def test_options_reach_the_settings(invoke: Invoke, text: Path) -> None:
    code, output, _ = invoke(
        *("train", "--data", str(text), "--steps", "2", "--out", "run", *SMALL),
        *("--fp8-format", "e5m2", "--margin", "0,0,1", "--rounding", "nearest,nearest,stochastic", "--skip", "decoder"),
        *("--amax-history-len", "8", "--amax-compute-algo", "ema", "--dtype", "bfloat16", "--optimizer", "adamw4bit"),
        *("--lr", "0.01", "--clip", "0.5", "--no-tf32", "--seed", "7", "--schedule", "constant"),
    )
    assert code == 0
    assert output.startswith("FP8 training enabled with format: e5m2\nUsing device: cpu with dtype torch.bfloat16\n")
    config = json.loads(Path("run/config.json").read_text())
    assert config["fp8"]["margin"] == [0, 0, 1] and config["fp8"]["rounding"] == ["nearest", "nearest", "stochastic"]
    assert config["fp8"]["skip"] == ["decoder"] and config["fp8"]["amax_history_len"] == 8
    assert (config["lr"], config["clip"], config["tf32"], config["seed"]) == (0.01, 0.5, False, 7)
    assert (config["optimizer"], config["schedule"], config["dtype"]) == ("adamw4bit", "constant", "bfloat16")


def test_precisions_without_fp8(invoke: Invoke, text: Path) -> None:
    arguments = ("train", "--data", str(text), "--steps", "2", *SMALL)
    for precision, dtype in (("bf16", "bfloat16"), ("fp32", "float32")):
        code, output, _ = invoke(*arguments, "--precision", precision, "--out", precision)
        assert code == 0
        assert output.startswith(
            f"FP8 training disabled: precision {precision}\nUsing device: cpu with dtype torch.{dtype}"
        )


def test_version_and_help(invoke: Invoke) -> None:
    code, output, _ = invoke("--version")
    assert code == 0 and output.startswith("octavo 0.")
    code, output, _ = invoke("train", "--help")
    assert code == 0
    for option in ("--data", "--compare", "--resume", "--fp8-format", "--optimizer", "--precision"):
        assert option in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "missing.txt"], ["missing.txt does not exist"]),
        (["--data", "*.nothing"], ["matches no file"]),
        (["--data", "empty.txt"], ["empty.txt is empty"]),
        (["--data", "text.txt", "--seq", "9999"], ["too short", "--seq"]),
        (["--precision", "fp4"], ["precision='fp4'", "fp8, bf16, fp32"]),
        (["--size", "7b"], ["'7b'", "tiny, 25m, 100m"]),
        (["--fp8-format", "e3m4"], ["fp8_format='E3M4'", "HYBRID"]),
        (["--recipe", "magic"], ["recipe='magic'", "delayed"]),
        (["--granularity", "block", "--scaling", "delayed"], ["granularity"]),
        (["--optimizer", "sgd"], ["optimizer='sgd'", "adamw4bit"]),
        (["--steps", "0"], ["steps=0"]),
        (["--neurons", "7"], ["neurons=7", "even"]),
        (["--data", "text.txt", "--device", "cpu", "--no-emulate"], ["emulate=False", "cpu has no FP8 tensor cores"]),
        (["--resume"], ["--resume needs --out"]),
        (["--resume", "--out", "nowhere"], ["nowhere holds no run"]),
        (["--resume", "--overwrite", "--out", "x"], ["one of them"]),
        (["--data", "text.txt", "--out", "text.txt/run", "--steps", "1"], ["text.txt/run", "--out"]),
    ],
)
def test_a_bad_request_is_one_line_and_exit_code_2(
    invoke: Invoke, text: Path, arguments: list[str], words: list[str]
) -> None:
    text.with_name("empty.txt").touch()
    code, _, error = invoke("train", *arguments)
    assert_one_line(error, *words)
    assert code == 2
    assert not Path("runs").exists()


@pytest.mark.parametrize("arguments", [["train", "--no-such-option"], ["train", "--steps", "many"], ["fly"]])
def test_a_command_line_that_cannot_be_parsed_is_exit_code_2(invoke: Invoke, arguments: list[str]) -> None:
    code, _, error = invoke(*arguments)
    assert code == 2 and "Traceback" not in error and arguments[1 if len(arguments) > 1 else 0] in error


def test_resume_and_its_refusals(invoke: Invoke, text: Path) -> None:
    run = ("train", "--data", str(text), "--steps", "6", "--out", "run", *SMALL)
    assert invoke(*run)[0] == 0
    whole = losses(Path("run"))
    code, _, error = invoke(*run)
    assert_one_line(error, "already holds a run", "--resume", "--overwrite")
    assert code == 2
    code, _, error = invoke("train", "--resume", "--out", "run", "--lr", "0.5")
    assert_one_line(error, "lr=0.5", "0.003")
    assert code == 2

    state = Path("run/checkpoint-000006/state.pt")
    state.write_bytes(state.read_bytes()[:-5])
    code, _, error = invoke("train", "--resume", "--out", "run")
    assert_one_line(error, "checkpoint-000006 is damaged", "checkpoint-000003")
    assert code == 1
    for path in state.parent.iterdir():
        path.unlink()
    state.parent.rmdir()
    code, output, _ = invoke("train", "--resume", "--out", "run", "--log-interval", "1")
    assert code == 0 and "Resuming after step 3" in output
    assert losses(Path("run")) == whole


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_says_how_to_go_on_and_sets_the_exit_code(
    invoke: Invoke, text: Path, number: int, code: int
) -> None:
    # More steps than any machine takes before the signal comes, however busy.
    steps = ("--steps", "1000000", "--schedule", "constant", "--save-interval", "1000000")
    arguments = ["train", "--data", str(text), "--out", "run", *SMALL, *steps]
    process = Command(*arguments)
    while not Path("run/metrics.jsonl").exists() or Path("run/metrics.jsonl").read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    output, error = process.communicate()
    assert process.returncode == code, error
    assert error == ""
    assert "Continue with: octavo train --resume --out run" in output
    done = len(rows(Path("run")))
    assert done >= 3 and Path(f"run/checkpoint-{done:06d}").is_dir()

    assert invoke("train", "--resume", "--out", "run", "--steps", str(done + 3))[0] == 0
    assert [row["step"] for row in rows(Path("run"))] == list(range(1, done + 4))


def test_a_disk_that_takes_no_more_is_one_line_and_exit_code_1(invoke: Invoke, text: Path) -> None:
    """A limit on file sizes is a full disk that needs no root: the system refuses the write in the same way."""
    arguments = ["train", "--data", str(text), "--steps", "6", "--out", "run", *SMALL]
    process = Command(*arguments, largest_file=20_000)  # metrics fit, the checkpoint's 60 kB do not
    _, error = process.communicate()
    assert process.returncode == 1
    assert_one_line(error, "cannot write run/checkpoint-000003", "File too large", "--resume")
    assert not list(Path("run").glob("checkpoint-*"))
    assert invoke("train", "--resume", "--out", "run")[0] == 0
    assert len(rows(Path("run"))) == 6


def test_out_of_memory_is_a_message_and_exit_code_1(
    invoke: Invoke, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.training.learner import Learner

    def step(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Learner, "step", step)
    code, _, error = invoke("train", "--data", str(text), "--steps", "2", "--out", "run")
    assert code == 1 and error.startswith("octavo: out of GPU memory: 2.0 GiB more") and "Traceback" not in error
    assert "--batch 4 --micro-batches 2" in error and "what took it: weights" in error


@pytest.mark.parametrize("name", ["summary.json", "products.json", "config.json", "sample.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]", '{"fp8": 1, "products": 2}'])
def test_a_damaged_file_of_a_finished_run_is_one_line(invoke: Invoke, text: Path, name: str, content: str) -> None:
    assert invoke("train", "--data", str(text), "--steps", "2", "--out", "run", *SMALL)[0] == 0
    Path("run", name).write_text(content)
    code, _, error = invoke("train", "--resume", "--out", "run")
    if name == "sample.json":
        assert code == 0, error  # it is written again
    else:
        assert_one_line(error, name)
        assert code == 1


def test_a_run_that_diverges_has_a_report_and_exit_code_1(invoke: Invoke, text: Path) -> None:
    run = ("train", "--data", str(text), "--steps", "4", "--out", "run", *SMALL)
    code, output, error = invoke(*run, "--lr", "1e30", "--warmup", "0", "--compare")
    assert_one_line(error, "diverged", "fp8 and bf16 ended without a finite loss", "--lr")
    assert code == 1 and "No sample" in output and "Report: run/report.html" in output
    assert Path("run/report.html").exists() and "NaN" not in Path("run/summary.json").read_text()


def test_overwrite_spares_a_folder_of_hugging_face(invoke: Invoke, text: Path) -> None:
    Path("model").mkdir()
    for name in ("config.json", "model.safetensors"):
        Path("model", name).write_text("{}")
    run = ("train", "--data", str(text), "--steps", "1", "--out", "model", *SMALL)
    code, _, error = invoke(*run, "--overwrite")
    assert_one_line(error, "model is not a run of Octavo", "nothing was touched", "--out")
    assert code == 2 and sorted(path.name for path in Path("model").iterdir()) == ["config.json", "model.safetensors"]


def test_two_processes_in_one_folder(invoke: Invoke, text: Path) -> None:
    """The second is told so in one line; the first goes on undisturbed."""
    arguments = ["train", "--data", str(text), "--steps", "1000000", "--out", "run", *SMALL]
    process = Command(*arguments)
    try:
        while not Path("run/metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.01)
        for mode in ("--resume", "--overwrite"):
            code, _, error = invoke("train", "--data", str(text), "--out", "run", mode)
            assert_one_line(error, "run is in use", "another process")
            assert code == 2
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    done = [row["step"] for row in rows(Path("run"))]
    assert done == list(range(1, len(done) + 1))


def test_signals_after_an_interrupt_do_not_change_the_exit_code() -> None:
    """Leaving takes a second, and someone impatient sends another."""
    code = """
import os, signal, octavo.cli as cli
from octavo.training.signals import Interrupted
def app():
    raise Interrupted(signal.SIGINT)
cli.app = app
try:
    cli.main()
finally:
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
"""
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT).returncode == 130
