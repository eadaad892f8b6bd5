"""benchmarks/rollouts.py and benchmarks/longest_completion.py on a tiny model; their figures need a GPU."""

import argparse
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def tiny(**changes):
    given = {"preset": "tiny", "layers": 1, "recipe": "channel", "rank": 4, "slots": [4, 2], "prompt": 5, "group": 2}
    given |= {"new_tokens": 6, "peer_tokens": 3, "profile": [4], "device": "cpu"}
    return argparse.Namespace(**{**given, **changes})


def test_attention(capsys):
    import rollouts

    rows = rollouts.attention(tiny())
    assert [(row["slots"], row["fp8"]) for row in rows] == [(4, False), (4, True), (2, False), (2, True)]
    assert all(row["us"] > 0 and row["share"] > 0 for row in rows) and "of a copy" in capsys.readouterr().out


def test_rollouts(capsys):
    import rollouts

    rows = rollouts.fp8(tiny())
    assert [(row["name"], row["slots"]) for row in rows] == [("channel", 4), ("channel+fp8-kv", 4), ("channel", 2)]
    assert rows[0]["live_step_s"] > 0 and rows[0]["kernels"] and "kernels" not in rows[1]
    assert "gap" in rows[0] and "gap" not in rows[2]
    out = capsys.readouterr().out
    assert "channel+fp8-kv, 4 slots × 6: " in out and "octavo::decode_attention" in out
    (row,) = rollouts.generate(tiny())
    assert row["new_tokens"] == 3 and "generate, 4 slots × 3: " in capsys.readouterr().out
    json.dumps(rows)


def test_sections_run_one_after_the_other(monkeypatch, tmp_path, capfd):
    import rollouts

    script = tmp_path / "child.py"
    script.write_text(
        "import sys\nsys.stdin.readline()\nprint('ran', sys.argv[-1], flush=True)\nsys.exit(sys.argv[-1] == 'bf16')\n"
    )
    monkeypatch.setattr(rollouts, "__file__", str(script))
    assert rollouts.run_all(["attention", "bf16", "fp8"], [], budget=600) == 1
    out = capfd.readouterr().out
    assert out.index("ran attention") < out.index("ran bf16") < out.index("== bf16 FAILED") < out.index("ran fp8")
    assert rollouts.run_all(["fp8"], [], budget=-1) == 0 and "left out" in capfd.readouterr().out


@pytest.mark.parametrize("arguments", [["--only", "fp8,vllm"], ["--preset", "9b"], []], ids=" ".join)
def test_what_is_refused(arguments, tmp_path, capsys):
    import rollouts

    if not arguments:
        pytest.importorskip("torch")
        if rollouts.torch.cuda.is_available():
            pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        rollouts.main([*arguments, "--out", str(tmp_path)])
    assert "error: " in capsys.readouterr().err


def longest_options(**changes):
    given = {"preset": "tiny", "layers": 1, "gib": 24.0, "slots": 4, "prompt": 5, "group": 2, "checkpointing": False}
    return argparse.Namespace(**{**given, "longest": 128, "device": "cpu", **changes})


@pytest.mark.parametrize("way", ["bf16", "channel+fp8-kv"])
def test_longest_completion(way):
    import longest_completion

    row = longest_completion.measure(longest_options(), way)
    assert row["longest"] == 128 and row["planned"] == (2048 - 5) // 64 * 64 and row["tried"] == {128: 0.0}


def test_a_completion_that_does_not_fit(monkeypatch):
    import longest_completion

    train = longest_completion.Run._train

    def limited(self, new_tokens):
        if new_tokens > 64:
            raise longest_completion.torch.OutOfMemoryError("no memory left")
        train(self, new_tokens)

    monkeypatch.setattr(longest_completion.Run, "_train", limited)
    row = longest_completion.measure(longest_options(), "channel")
    assert row["longest"] == 64 and row["failed_in"] == {128: "training"}


def test_checkpointing():
    import longest_completion

    row = longest_completion.measure(longest_options(checkpointing=True, longest=64), "channel")
    assert row["longest"] == 64
