"""`octavo bench` on a tiny model on the CPU: twice as people run it, by the real command and with real workers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from bench_cases import WorkerHere

from octavo.cli import main
from octavo.tools.bench import runner
from octavo.tools.shapes import Case

OCTAVO = Path(sys.executable).with_name("octavo")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
SHORT = ["--rounds", "2", "--steps", "2", "--warmup", "1", "--device", "cpu"]
CONFIG = {
    "model_type": "qwen2",
    "_name_or_path": "/somewhere/on/this/machine",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}
Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(invoke: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The command and its workers in this process, which has imported all they need."""
    monkeypatch.setattr(runner, "WorkerProcess", WorkerHere)
    return lambda *arguments: invoke("bench", *arguments)


def read(folder: Path, pattern: str = "*.json") -> dict:
    (path,) = folder.glob(pattern)
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def check_run(result: dict, timed: list[str]) -> None:
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [*timed, "te", "bf16-compiled"]
    assert rows["bf16-compiled"]["reason"] == "left out by --no-compile"
    assert rows["te"]["status"] == "not run"
    for name in timed:
        row = rows[name]
        assert (row["status"], row["reason"]) == ("timed", "")
        assert [len(turn["times"]) for turn in row["turns"]] == [2, 2]
        times = sorted(seconds for turn in row["turns"] for seconds in turn["times"])
        figures = row["figures"]
        assert figures["step_s"] == pytest.approx((times[1] + times[2]) / 2)
        assert (figures["fastest_s"], figures["slowest_s"]) == (times[0], times[-1])
        assert figures["tokens_per_s"] == pytest.approx(256 / figures["step_s"])
        assert figures["tflops"] == pytest.approx(result["flops"] / figures["step_s"] / 1e12)
        assert figures["speedup_octavo-bf16"] == (
            pytest.approx(rows["octavo-bf16"]["figures"]["step_s"] / figures["step_s"])
            if "octavo-bf16" in timed
            else None
        )
        assert figures["speedup_bf16-compiled"] is None
        assert row["check"]["cosine"] > 0.95 and abs(row["check"]["loss_difference"]) < 0.01
        # Weights are drawn again for every turn, and are the same ones.
        assert len({turn["loss"] for turn in row["turns"]}) == 1 or row["recipe"] == "delayed"
    assert rows["bf16-eager"]["check"]["cosine"] == pytest.approx(1.0)
    rates = rows["octavo delayed"]["figures"]["scaling"]
    assert set(rates) == {"x", "w", "g"} and all(0 <= rate["underflow_max"] <= 1 for rate in rates.values())
    assert result["versions"]["torch"] and result["device"] == "CPU"


def test_a_run_on_a_hugging_face_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = subprocess.run(
        [str(OCTAVO), "bench", "--preset", "tiny", "--against", "bf16-eager,te,bf16-compiled", "--no-compile", *SHORT],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert "these times say nothing about FP8" in run.stdout
    result = read(tmp_path, "20??-??-??-cpu-tiny-2l.json")
    check_run(result, ["bf16-eager", "octavo delayed"])
    assert result["command"].startswith("octavo bench --preset tiny --against bf16-eager,te,bf16-compiled")


def test_more_contenders(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = ("--preset", "tiny", "--recipe", "delayed,block", "--against", "bf16-eager,octavo-bf16,te,bf16-compiled")
    code, _, error = bench(*command, "--no-compile", *SHORT)
    assert code == 0, error
    result = read(tmp_path, "20??-??-??-cpu-tiny-2l.json")
    check_run(result, ["bf16-eager", "octavo-bf16", "octavo delayed", "octavo block"])
    assert result["command"].startswith("octavo bench --preset tiny --recipe delayed,block")


def test_lora_on_a_frozen_base(bench: Bench, tmp_path: Path) -> None:
    options = "--preset tiny --mode lora --rank 4 --layers 1 --tokens 64 --seq 32 --no-compile --rounds 1 --steps 1"
    more = ("--warmup", "1", "--against", "bf16-eager,te", "--recipe", "block,block+weights-only")
    code, output, error = bench(*options.split(), *more)
    assert code == 0, output + error
    result = read(tmp_path, "*-cpu-tiny-1l-lora4-64t.json")
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["octavo block"]["check"]["cosine"] > 0.99 and rows["te"]["status"] != "timed"
    assert "MLP with its activation in one function" in rows["octavo block"]["summary"]
    assert "products in high precision" in rows["octavo block weights-only"]["summary"]
    assert rows["octavo block weights-only"]["check"]["cosine"] > rows["octavo block"]["check"]["cosine"]
    case = Case.from_dict(result["case"])
    linears = case.matmul_parameters - 64 * 256
    adapters = 4 * (4 * 64 + 64 + 2 * 32 + 64 + 2 * 64 + 2 * 128 + 64 + 128)  # ins and outs of the seven, rank 4
    assert case.adapter_parameters == adapters
    assert case.flops == 4 * (linears + 64 * 256) * 64 + 6 * adapters * 64 + case.attention_flops


def test_whole_steps(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    options = "--preset tiny --layers 1 --tokens 64 --seq 32 --no-compile --rounds 2 --steps 1 --warmup 1"
    recipe = "delayed+fp8-activations+in-backward+offload-optimizer,delayed+offload-master"
    more = ("--against", "bf16-eager,octavo-bf16", "--recipe", recipe, "--optimizer", "adamw4bit")
    code, output, error = bench(*options.split(), *more)
    assert code == 0, output + error
    assert "forward + backward + optimiser" in output
    rows = {row["name"]: row for row in read(tmp_path, "*-cpu-tiny-1l-64t-optimizer.json")["rows"]}
    assert list(rows) == [
        "bf16-eager",
        "octavo-bf16 adamw4bit",
        "octavo delayed fp8-activations in-backward offload-optimizer adamw4bit",
        "octavo delayed offload-master adamw4bit",
    ]
    assert [row["optimizer"] for row in rows.values()] == ["adamw", *["adamw4bit"] * 3]
    own = rows["octavo-bf16 adamw4bit"]["figures"]["step_s"]
    for row in rows.values():
        assert (row["status"], row["reason"]) == ("timed", "") and row["check"]["cosine"] > 0.95
        if row["optimizer"] == "adamw4bit":
            assert row["figures"]["speedup_octavo-bf16"] == pytest.approx(own / row["figures"]["step_s"])


def test_bdh_under_the_autocast(bench: Bench, tmp_path: Path) -> None:
    shape = ("--preset", "bdh-tiny", "--layers", "1", "--seq", "32", "--tokens", "64")
    code, _, error = bench(*shape, "--no-compile", *SHORT)
    assert code == 0, error
    rows = {row["name"]: row for row in read(tmp_path)["rows"]}
    assert rows["bf16-eager"]["status"] == rows["octavo delayed"]["status"] == "timed"
    assert rows["octavo delayed"]["check"]["failure"] == ""
    assert rows["torchao"]["status"] == "not run"


def test_a_configuration_file_leaves_no_folder_in_the_result(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "small.json"
    config.write_text(json.dumps(CONFIG))
    arguments = ("--config", str(config), "--layers", "1", "--tokens", "32", "--seq", "16", "--no-compile")
    code, _, error = bench(*arguments, "--against", "bf16-eager", *SHORT)
    assert code == 0, error
    text = next(tmp_path.glob("*-cpu-small-1l-32t.json")).read_text()
    assert str(tmp_path) not in text and "/somewhere" not in text and os.uname().nodename not in text
    assert "--config small.json" in text


def test_gemm_and_kernels(bench: Bench, tmp_path: Path) -> None:
    shape = ("--preset", "tiny", "--tokens", "32", "--seq", "16", "--device", "cpu")
    assert bench(*shape, "--gemm")[0] == 0
    rows = read(tmp_path, "*-gemm.json")["rows"]
    assert len(rows) == 5 * 3 * 5 and all(row["status"] == "timed" and row["tflops"] > 0 for row in rows)

    assert bench(*shape, "--kernels")[0] == 0
    rows = read(tmp_path, "*-kernels.json")["rows"]
    assert len(rows) == 5 * (3 * 3 + 2) and all(row["status"] == "timed" for row in rows)
    row = next(row for row in rows if row["name"] == "current x both")
    assert row["shape"] == [32, 64]
    assert row["bytes"] == 32 * 64 * (2 + 1 + 1) + 4 + 4  # read once in BF16, written twice in FP8, two scales
    fused = next(row for row in rows if row["name"] == "current swiglu backward both")
    # dh and gate|up are read; gradients of both leave as rows and columns, h as columns; three scales. Not fused here:
    # the amax of each comes first, from what is written and read in between.
    assert fused["bytes"] == 32 * 128 * 2 + 32 * 256 * 2 + 32 * 256 * 2 + 32 * 128 + 12
    assert row["tb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e12)
    assert row["moved_bytes"] == row["bytes"] + 32 * 64 * 2  # the amax comes first
    assert row["moved_share_of_copy"] / row["share_of_copy"] == pytest.approx(row["moved_bytes"] / row["bytes"])
    assert row["moved_share_of_equal_copy"] > 0
    between = (1 + 2) * 2 * 32 * 128 + (1 + 2) * 32 * 128
    assert fused["moved_bytes"] == fused["bytes"] + between * 2


STEPS = ["--preset", "tiny", "--optimizer", "adamw"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--preset", "--config"]),
        (["--preset", "9b"], ["preset='9b'", "1b, 3b, 8b"]),
        (["--preset", "8b", "--device", "cpu"], ["8b", "parameters", "--preset tiny", "--force"]),
        (["--preset", "tiny", "--mode", "half"], ["mode='half'", "full, lora"]),
        (["--preset", "tiny", "--rank", "8"], ["--rank 8", "--mode lora"]),
        (["--preset", "tiny", "--targets", "mlp"], ["--targets mlp", "--mode lora"]),
        (["--preset", "tiny", "--mode", "lora", "--rank", "-1"], ["rank=-1", "0 for the frozen base"]),
        (["--preset", "tiny", "--mode", "lora", "--rank", "0", "--targets", "mlp"], ["--targets mlp", "--rank 0"]),
        (["--preset", "tiny", "--mode", "lora", "--targets", "head"], ["targets='head'", "attention"]),
        (["--preset", "tiny", "--mode", "lora", "--recipe", "delayed"], ["--recipe delayed", "block, channel"]),
        (["--preset", "tiny", "--mode", "lora", "--recipe", "block+wgrad-channel"], ["--wgrad", "leave it out"]),
        (["--preset", "bdh-tiny", "--mode", "lora"], ["--mode lora", "BDH"]),
        (["--preset", "tiny", "--recipe", "delayed,magic"], ["recipe='magic'", "channel"]),
        (["--preset", "tiny", "--recipe", "delayed+magic"], ["magic", "fp8-head"]),
        (["--preset", "tiny", "--recipe", "delayed+wgrad-channel"], ["delayed+wgrad-channel", "block recipe"]),
        (["--preset", "tiny", "--recipe", "delayed+in-backward"], ["delayed+in-backward", "--optimizer adamw"]),
        (["--preset", "tiny", "--device", "cpu", "--recipe", "delayed+graphs"], ["delayed+graphs", "GPU", "leave"]),
        ([*STEPS, "--recipe", "delayed+offload-optimizer+offload-master"], ["offload-optimizer+", "give one"]),
        ([*STEPS, "--recipe", "channel+offload-master"], ["channel+offload-master", "delayed, current, block"]),
        ([*STEPS, "--mode", "lora", "--recipe", "block+offload-master"], ["--mode lora", "leave offload-master out"]),
        (["--preset", "bdh-tiny", "--recipe", "delayed+fp8-head"], ["delayed+fp8-head", "--recipe delayed"]),
        (["--preset", "tiny", "--mode", "lora", "--recipe", "block+fp8-activations"], ["FP8 anyway"]),
        (["--preset", "tiny", "--recipe", "block+weights-only"], ["block+weights-only", "--mode lora"]),
        (["--preset", "tiny", "--optimizer", "sgd"], ["optimizer='sgd'", "adamw4bit"]),
        (["--preset", "tiny", "--against", "apex"], ["against='apex'", "torchao"]),
        (["--preset", "tiny", "--tokens", "100", "--seq", "64"], ["tokens=100", "multiple"]),
        (["--preset", "tiny", "--rounds", "0"], ["rounds=0"]),
        (["--preset", "tiny", "--wgrad", "channel"], ["--wgrad channel", "block"]),
        (["--preset", "bdh-tiny", "--head", "fp8"], ["--head fp8", "BDH"]),
        (["--preset", "tiny", "--gemm", "--kernels"], ["one of them"]),
        ([*STEPS, "--gemm"], ["--optimizer adamw", "--gemm times parts", "leave one out"]),
        (["--config", "nowhere.json"], ["nowhere.json", "no such file"]),
        (["--config", "experts.json"], ["num_local_experts=8", "dense"]),
        (["--config", "short.json"], ["short.json", "hidden_size"]),
    ],
)
def test_a_bad_request_is_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    (tmp_path / "experts.json").write_text(json.dumps({**CONFIG, "num_local_experts": 8}))
    (tmp_path / "short.json").write_text('{"model_type": "llama"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["octavo", "bench", *arguments])
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("octavo: ") and error.count("\n") == 1
    for word in words:
        assert word in error, error
    assert not list(tmp_path.glob("20*.json"))


def test_no_contender_that_works_is_an_error(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    def failing(worker: WorkerHere) -> None:
        worker._asked.pop(0)
        raise runner.WorkerError("out of memory")

    monkeypatch.setattr(WorkerHere, "answer", failing)
    path = tmp_path / "x.json"
    for kind in ([], ["--workload", "padded"]):
        path.unlink(missing_ok=True)
        shape = ["--preset", "tiny", "--no-compile", "--against", "bf16-eager", "--device", "cpu", *kind]
        code, output, error = bench(*shape, "--out", str(path))
        assert code == 1 and "out of memory" in output and f"no contender was timed; {path} says why" in error
        assert all(row["status"] != "timed" for row in read(tmp_path)["rows"])


def test_it_writes_where_it_is_told(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    short = ("--preset", "tiny", "--no-compile", "--against", "bf16-eager", "--recipe", "delayed", *SHORT)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for out in ("here", "there/mine.json"):
        code, output, error = bench(*short, "--out", out)
        assert code == 0, error
        (path,) = Path(out.split("/")[0]).glob("*.json")
        assert f"Result: {path}" in output and json.loads(path.read_text())["rows"]
    assert path.name == "mine.json" and not list(Path("benchmarks/results").iterdir())
    before = path.read_bytes()
    code, output, error = bench(*short, "--out", "there/mine.json")  # before anything is measured
    assert code == 2 and "--out there/mine.json: that file exists" in error and output == ""
    assert path.read_bytes() == before
    Path("notes.txt").touch()
    assert "neither a folder" in bench(*short, "--out", "notes.txt")[2]
    assert bench(*short)[0] == 0 and len(list(Path("benchmarks/results").glob("*.json"))) == 1


def test_ctrl_c_leaves_no_worker(tmp_path: Path) -> None:
    shape = ("--preset", "bdh-tiny", "--layers", "1", "--seq", "32", "--tokens", "64")  # which imports no transformers
    process = subprocess.Popen(
        [str(OCTAVO), "bench", *shape, "--no-compile", "--against", "bf16-eager", *SHORT[2:], "--rounds", "10000"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Round 2 "):
            break
    workers = children(process.pid)
    assert workers
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in error
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        time.sleep(0.05)
    assert not list(tmp_path.glob("20*.json"))


def children(pid: int) -> list[int]:
    actual = []
    for path in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # a process that ends meanwhile
            status = path.read_text()
            if re.search(rf"^PPid:\t{pid}$", status, re.MULTILINE):
                actual.append(int(re.search(r"^Pid:\t(\d+)$", status, re.MULTILINE)[1]))
    return actual
