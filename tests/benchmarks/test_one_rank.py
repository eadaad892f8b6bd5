"""The checks on one rank, on the tiny preset: they run on a CPU, and a check that fails does not end the others."""

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


def run(tmp_path, checks):
    import one_rank

    out = tmp_path / "one.json"
    code = one_rank.main(f"--preset tiny --device cpu --checks {checks} --out {out}".split())
    assert str(tmp_path) not in out.read_text()
    return code, json.loads(out.read_text())


def test_checks_hold_on_a_cpu(tmp_path):
    code, result = run(tmp_path, "bits,shards,amax,lora,graphs,float8")
    rows = {row["check"]: row for row in result["rows"]}
    assert code == 0 and all(row["ok"] for row in rows.values())
    assert rows["bits"]["equal"] and len(rows["bits"]["ways"]) == 6 and rows["lora"]["equal"]
    assert len(rows["shards"]["rows"]) == 9 and rows["amax"]["bytes"] == 1_704_000
    assert "need a GPU" in rows["graphs"]["left_out"]
    assert {"date", "command", "device", "versions"} <= result.keys()

    import tables

    assert "| bits | holds |" in tables.one_rank_table(result)


@pytest.mark.slow
def test_streams(tmp_path):
    code, result = run(tmp_path, "streams")
    assert code == 0 and result["rows"][0]["ok"]


def test_a_check_that_fails_leaves_the_others(monkeypatch, tmp_path, capsys):
    import one_rank

    def fails(_options):
        raise RuntimeError("no such thing")

    monkeypatch.setitem(one_rank.CHECKS, "amax", fails)
    code, result = run(tmp_path, "amax,float8")
    assert code == 1 and [row["ok"] for row in result["rows"]] == [False, True]
    assert result["rows"][0]["error"] == "RuntimeError: no such thing"
    assert "amax: FAILED" in capsys.readouterr().out

    import tables

    assert "| amax | fails: RuntimeError: no such thing |" in tables.one_rank_table(result)


def test_an_unknown_check(capsys):
    import one_rank

    with pytest.raises(SystemExit):
        one_rank.main(["--checks", "speed"])
    assert "'speed' is none of bits" in capsys.readouterr().err
