"""The first step after loading, on the tiny preset: the rows, and the processes that take turns."""

import io
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("way", ["full", "lora"])
def test_one_process(monkeypatch, capsys, way):
    import first_step

    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    first_step.main(["--preset", "tiny", "--layers", "1", "--device", "cpu", "--one", way])
    loaded, row = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert loaded == {"loaded": way} and row["way"] == way and row["recipe"] == first_step.WAYS[way]
    assert row["first"] > 0 and len(row["later"]) == first_step.STEPS - 1 and row["loading"] > 0
    assert row["loss"] == pytest.approx(5.55, abs=0.05)  # ln 256


@pytest.mark.slow
def test_processes(tmp_path):
    import first_step

    out = tmp_path / "first.json"
    first_step.main(f"--preset tiny --layers 1 --device cpu --ways lora --out {out}".split())
    result = json.loads(out.read_text())
    assert [row["cache"] for row in result["rows"]] == ["cold", "warm"]
    assert result["command"].startswith("python benchmarks/first_step.py --preset tiny")
    assert str(tmp_path) not in out.read_text()


def test_steps_run_one_after_the_other_once_all_have_loaded(monkeypatch, tmp_path):
    import first_step

    events = []

    class Process:
        def __init__(self, way, caches, _options):
            self.way = way
            events.append(("start", way, str(caches)))

        def answer(self):
            events.append(("loaded", self.way))
            return {"loaded": self.way}

        def take_steps(self):
            events.append(("steps", self.way))
            return {"way": self.way, "recipe": "r", "loading": 1.0, "first": 2.0, "later": [0.5], "loss": 5.5}

        def end(self):
            events.append(("end", self.way))

    monkeypatch.setattr(first_step, "Process", Process)
    first_step.main(["--preset", "tiny", "--device", "cpu", "--out", str(tmp_path / "out.json")])
    order = [event[:2] for event in events]
    once = [("start", "full"), ("start", "lora"), ("loaded", "full"), ("loaded", "lora")]
    once += [("steps", "full"), ("end", "full"), ("steps", "lora"), ("end", "lora"), ("end", "full"), ("end", "lora")]
    assert order == once * 2
    assert len({event[2] for event in events if event[0] == "start"}) == 1  # the second finds what the first left


def test_no_such_way(capsys):
    import first_step

    with pytest.raises(SystemExit):
        first_step.main(["--preset", "tiny", "--ways", "full,qlora"])
    assert "'qlora' is none of full, lora" in capsys.readouterr().err
