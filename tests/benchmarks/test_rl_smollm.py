"""benchmarks/rl_smollm.py on a tiny model: its parts run, results come as they are there; its figures need a GPU."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Options for a decoder of digits, and sums for it."""
    pytest.importorskip("transformers")
    from octavo.grpo import demo

    folder = tmp_path_factory.mktemp("tiny")
    demo.make_base(folder / "model", 0, steps=1, progress=lambda *_: None)
    rows = [{"prompt": f"{a}>", "answer": str(a)} for a in range(8)]
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"model": folder / "model", "task": folder / "task.jsonl", "out": folder, "device": "cpu", "rank": 4}
    options |= {"prompts": 2, "completions": 2, "max-new-tokens": 4, "gap-tokens": 4, "gap-prompts": 3, "seeds": 1}
    return [f"--{name}={value}" for name, value in options.items()]


def test_the_last_number_counts():
    from chain_sum import last_number

    chat = [{"role": "assistant", "content": "4 − 7 is −3."}]
    assert last_number([chat, "5 or 6", "-3 4", "none"], ["-3", "6", "-3", "0"]) == [1.0, 1.0, 0.0, 0.0]


def test_the_task_is_what_octavo_reads():
    from octavo.rl.tasks import read_task

    task = read_task(str(BENCHMARKS / "chain_sum.jsonl"), BENCHMARKS / "chain_sum.py")
    assert len(task.rows) == 512 and task.rewards.names == ["last_number"]
    assert len({row["prompt"][0]["content"] for row in task.rows}) == 512
    for row in task.rows:
        sums = row["prompt"][0]["content"].split(": ")[1].rstrip("= ")
        assert str(eval(sums)) == row["answer"]


@pytest.mark.parametrize(
    ("way", "rollout"), [("bf16", "weights"), ("weights-only", "weights"), ("fp8-dgrad", "weights"), ("fp8", "fp8")]
)
def test_gaps(given, way, rollout):
    import rl_smollm

    row = rl_smollm.measure_gap(rl_smollm.read_options(given), way, rollout)
    frozen = {"bf16": (0, 0, 0), "weights-only": (0, 14, 0), "fp8-dgrad": (0, 0, 14), "fp8": (14, 0, 0)}[way]
    assert tuple(row["linears"].values()) == frozen
    assert row["tokens"] >= 6 and 0 <= row["gap_mean"] < 0.05 and row["gap_clip"] == 0
    json.dumps(row)


def test_runs_write_results_as_they_come(given, monkeypatch, tmp_path, capfd):
    import rl_smollm

    monkeypatch.setattr(rl_smollm, "LOOK", 0.5)
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent))
    out = [f"--out={tmp_path}", "--parts=reward", "--ways=bf16", "--steps=2", "--budget=100"]
    assert rl_smollm.main([*given, *out]) == 0, (tmp_path / "bf16-0.log").read_text()
    result = json.loads((tmp_path / "result.json").read_text())
    (run,) = result["runs"]
    assert run["steps"] == len(run["reward"]) == result["compared_steps"] == 2 and not result["stopped"]
    assert "reward, bf16, seed 0" in capfd.readouterr().out
    assert str(tmp_path) not in (tmp_path / "result.json").read_text()


def test_a_part_that_fails_or_hangs_leaves_the_others(given, monkeypatch, tmp_path, capfd):
    import rl_smollm

    monkeypatch.setattr(rl_smollm, "LOOK", 0.1)
    monkeypatch.setattr(rl_smollm, "GRACE", 0.5)
    metrics = {"reward": 0.5, "length": 3, "equal_groups": 0, "gap_mean": 0.1, "gap_clip": 0, "kl": None}
    metrics |= {"corrected": 0, "rollout_s": 1, "train_s": 1}
    script = tmp_path / "part.py"
    script.write_text(
        "import json, pathlib, signal, sys, time\n"
        "name = sys.argv[1]\n"
        "if name == 'gap':\n    print('it broke'); sys.exit(3)\n"
        "folder = pathlib.Path(sys.argv[2], name)\nfolder.mkdir()\n"
        f"row = json.dumps({metrics!r}) + '\\n'\n"
        "(folder / 'metrics.jsonl').write_text(row * 3 + row[:5])\n"
        "if name == 'fp8-0':\n    signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)\n"
    )
    command = [sys.executable, str(script)]
    names = ("gap", "bf16-0", "weights-only-0", "fp8-0")
    monkeypatch.setattr(rl_smollm, "commands_of", lambda *_: {name: [*command, name, str(tmp_path)] for name in names})
    assert rl_smollm.main([*given, f"--out={tmp_path}", "--budget=2"]) == 1
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["failed"] == {"gap": "it broke"} and result["stopped"] == ["fp8-0"]
    assert [run["steps"] for run in result["runs"]] == [3, 3, 3]
    assert "FAILED gap: it broke" in capfd.readouterr().out


def run_of(way, seed, rewards):
    return {"way": way, "seed": seed, "steps": len(rewards), "reward": rewards}


def test_the_last_fifth_of_common_steps_is_compared():
    from rl_smollm import judge_rewards

    runs = [run_of("bf16", 0, [0.0] * 8 + [0.5, 0.7]), run_of("bf16", 1, [0.0] * 8 + [0.8] * 2)]
    runs += [run_of("fp8", 0, [0.0] * 8 + [0.7, 0.7, 9.0]), run_of("weights-only", 0, [0.0] * 8 + [0.5, 0.5])]
    record = {"runs": [*runs, run_of("fp8", 1, [0.0])], "failed": {"fp8-1": ""}}
    verdicts = judge_rewards(record)
    assert record["compared_steps"] == 10 and record["bf16_range"] == pytest.approx([0.6, 0.8])
    assert list(verdicts.values()) == [True, False]


def test_gaps_are_judged():
    from rl_smollm import judge_gap

    def row(way, gap, clip):
        return {"way": way, "rollout": "weights", "gap_mean": gap, "gap_clip": clip}

    verdicts = judge_gap([row("bf16", 0.04, 0.001), row("weights-only", 0.051, 0.02), row("fp8", 0.2, 0.2)])
    assert list(verdicts.values()) == [True, False, False]


def test_the_table_reads_a_result(monkeypatch, tmp_path):
    import rl_smollm
    import tables

    gap = {"way": "bf16", "rollout": "weights", "gap_mean": 0.04, "gap_p99": 0.2, "gap_k3": 1e-3, "gap_exp": 1.04}
    record = {"gap": [{**gap, "gap_clip": 0.001}], "runs": [run_of("bf16", 0, [0.1] * 4 + [0.9])], "failed": {}}
    record |= {"date": "2026-11-17", "device": "GPU", "versions": {"torch": "2"}, "model": "smollm2-135m"}
    record |= {"settings": {"prompts": 16, "completions": 8}}
    rl_smollm.judge_gap(record["gap"])
    rl_smollm.judge_rewards(record)
    (tmp_path / "2026-11-17-gpu-rl-smollm.json").write_text(json.dumps(record))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    text = tables.rl_smollm()
    assert "| bf16, rollout weights | 1.00x | 0.0400 | 0.200 | 1.0e-03 | 1.040 | 0.10% |" in text
    assert "| bf16, seed 0 | 0.100 | 0.900 |" in text and "5 steps of 16 × 8 completions" in text
