"""The parity experiment on toy models: every part of the path that the GPU sitting takes, in seconds."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def _scripts_on_one_thread():
    sys.path.insert(0, str(BENCHMARKS))
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # the models are so small that threads only wait for one another: 70 s instead of 17 were seen
    yield
    torch.set_num_threads(threads)
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    import parity

    out = tmp_path_factory.mktemp("parity") / "parity.json"
    parity.main(f"--tiny --device cpu --steps 12 --recipes bf16,delayed --out {out}".split())
    return out


def test_runs_go_by_importance_and_the_table_judges_them(result):
    import parity_summary

    record = json.loads(result.read_text())
    order = ("bf16", "delayed", "bf16-noise1", "bf16-noise2")
    assert [(r["run"], r["task"]) for r in record["runs"]] == [(n, t) for n in order for t in ("bdh", "llama")]
    for run in record["runs"]:
        assert run["status"] == "complete" and run["steps"] == 12 and run["held_out_tokens"] >= 2048, run
        assert run["curve"]["step"] == [10, 12]
    first = {r["task"]: r for r in record["runs"] if r["run"] == "bf16"}
    for run in record["runs"]:
        same = run["initial_weights_sum"] == first[run["task"]]["initial_weights_sum"]
        assert same == ("noise" not in run["run"])
        if "bf16" not in run["run"]:
            assert 0 <= run["underflow"]["mean"] <= run["underflow"]["max"] < 0.05
            assert run["held_out_loss"] != first[run["task"]]["held_out_loss"]
            assert run["held_out_loss_in_bf16"] == pytest.approx(run["held_out_loss"], rel=0.01)
            assert run["held_out_loss_in_bf16"] != run["held_out_loss"]
    table = parity_summary.summarise(record)
    assert table.count("| baseline |") == 6 and "FAIL" not in table and "ERROR" not in table


def test_resume_does_only_what_is_missing(result):
    import parity

    before = json.loads(result.read_text())["runs"]
    common = f"--tiny --device cpu --steps 12 --only bdh --resume --out {result}".split()
    parity.main([*common, "--recipes", "bf16,delayed,channel"])
    after = json.loads(result.read_text())["runs"]
    assert after[:-1] == before and after[-1]["run"] == "channel"
    with pytest.raises(SystemExit, match="another bdh"):
        parity.main([*common, "--batch", "2"])


def test_seeds_are_compared_in_pairs(tmp_path):
    import parity
    import parity_summary

    out = tmp_path / "parity.json"
    runs = "bf16,delayed,bf16-seed1,delayed-seed1"
    parity.main(f"--tiny --device cpu --steps 4 --only llama --bf16-runs 1 --recipes {runs} --out {out}".split())
    record = json.loads(out.read_text())
    by_name = {run["run"]: run for run in record["runs"]}
    assert list(by_name) == runs.split(",")
    assert by_name["delayed-seed1"]["initial_weights_sum"] == by_name["bf16-seed1"]["initial_weights_sum"]
    assert by_name["bf16-seed1"]["initial_weights_sum"] != by_name["bf16"]["initial_weights_sum"]
    losses = {name: run["held_out_loss"] for name, run in by_name.items()}
    difference = (losses["delayed"] / losses["bf16"] + losses["delayed-seed1"] / losses["bf16-seed1"]) / 2 - 1
    table = parity_summary.summarise(record)
    assert table.count(f"pass ({difference:+.3%} over 2 seeds)") == 2
    assert "over 2 seeds." in table


def test_optimisers_are_held_against_adamw(tmp_path):
    import parity
    import parity_summary

    pytest.importorskip("torchao")
    out = tmp_path / "parity.json"
    runs = "bf16,bf16+adamw8bit"
    parity.main(f"--tiny --device cpu --steps 4 --only bdh --bf16-runs 1 --recipes {runs} --out {out}".split())
    record = json.loads(out.read_text())
    assert [run["run"] for run in record["runs"]] == runs.split(",")
    plain, low = record["runs"]
    assert plain["initial_weights_sum"] == low["initial_weights_sum"]
    assert low["held_out_loss"] == pytest.approx(plain["held_out_loss"], rel=0.01)
    assert "pass: " in parity_summary.summarise(record) and "to AdamW" in parity_summary.summarise(record)
    low["held_out_loss"] *= 1.02
    assert "**FAIL**: " in parity_summary.summarise(record)
    with pytest.raises(SystemExit):
        parity.main(f"--tiny --device cpu --recipes bf16+sgd --out {out}".split())


def test_no_run_starts_or_goes_on_without_time(tmp_path):
    import parity

    out = tmp_path / "parity.json"
    parity.main(f"--tiny --device cpu --only bdh --budget-seconds 0 --out {out}".split())
    record = json.loads(out.read_text())
    assert not record["runs"] and len(record["not_run"]) == 9

    import parity_runs
    from corpus import byte_corpus

    task, data = parity.put_data(parity.TINY["bdh"], byte_corpus([BENCHMARKS / "parity.py"]), torch.device("cpu"))
    stopped = parity_runs.train(task, "bf16", data, device=torch.device("cpu"), compile_backend=None, deadline=0.0)
    assert stopped["status"] == "out of budget" and stopped["steps"] == parity_runs.CHECK


def test_a_run_that_is_not_finite_stops_and_fails(monkeypatch):
    import parity
    import parity_runs
    import parity_summary
    from corpus import byte_corpus

    task, data = parity.put_data(parity.TINY["bdh"], byte_corpus([BENCHMARKS / "parity.py"]), torch.device("cpu"))
    plain = parity_runs.PreparedModel.loss
    monkeypatch.setattr(parity_runs.PreparedModel, "loss", lambda self, window: plain(self, window) * float("nan"))
    run = parity_runs.train(task, "bf16", data, device=torch.device("cpu"), compile_backend=None, deadline=np.inf)
    assert (run["status"], run["steps"], run["curve"]["loss"]) == ("nan", parity_runs.WARM, [None])
    assert "FAIL" in parity_summary.verdict(run, None, None)
    json.dumps(run, allow_nan=False)


@pytest.mark.parametrize(
    ("loss", "verdict"), [(2.0049, "pass"), (2.0051, "**FAIL**"), (1.9951, "pass"), (1.9, "pass (better than BF16)")]
)
def test_verdict_at_a_quarter_of_a_percent(loss, verdict):
    assert _verdict(loss, bf16=(2.0, 2.0, 2.0)) == verdict


def test_a_wide_spread_allows_twice_itself():
    assert _verdict(2.0199, bf16=(1.995, 2.0, 2.005)) == "pass"
    assert _verdict(2.0201, bf16=(1.995, 2.0, 2.005)) == "**FAIL**"


def _verdict(loss, bf16):
    """The verdict on `channel`, as the table prints it."""
    import parity_summary

    names = ("bf16", "bf16-noise1", "bf16-noise2", "channel")
    runs = [
        {"task": "bdh", "run": name, "status": "complete", "held_out_loss": value, "held_out_tokens": 1, "steps": 1}
        for name, value in zip(names, (*bf16, loss), strict=True)
    ]
    task = {"steps": 1, "batch": 1, "sequence": 1, "unit": "byte", "shape": {}}
    versions = {"torch": ""}
    record = {"tasks": {"bdh": task}, "runs": runs, "gpu": "", "versions": versions, "date": "", "shared_gpu": False}
    table = parity_summary.summarise(record | {"not_run": []})
    line = next(line for line in table.splitlines() if line.startswith("| channel"))
    return line.split(" | ")[4]


def test_curves_are_drawn(result, tmp_path):
    pytest.importorskip("matplotlib")
    import parity_summary

    parity_summary.plot([json.loads(result.read_text())], tmp_path / "parity.png")
    assert (tmp_path / "parity.png").stat().st_size > 10_000


def test_the_corpus_spells_its_text_and_survives_the_file(tmp_path):
    from corpus import Corpus, load_corpus, save_corpus

    spellings = [b"\0", b"a", b"bc", b"\xc3\xa9", b" the"]
    corpus = Corpus(np.array([1, 2, 0, 4, 3], np.uint16), np.array([3, 0], np.uint16), spellings, {"seed": 0})
    save_corpus(tmp_path / "c.npz.xz", corpus)
    loaded = load_corpus(tmp_path / "c.npz.xz")
    assert loaded.as_bytes(loaded.train).tobytes() == b"abc\0 the\xc3\xa9"
    assert loaded.as_bytes(loaded.held_out).tobytes() == b"\xc3\xa9\0"
    assert loaded.spellings == spellings and loaded.about == {"seed": 0}


def test_the_tokenizer_spells_what_it_read():
    tokenizers = pytest.importorskip("tokenizers")
    assert tokenizers
    from corpus import Corpus, encode, learn_tokenizer, token_spellings

    texts = ["def f(x):\n\treturn x\n" * 20, "naïve – 漢字 \x7f \r\n"]
    tokenizer = learn_tokenizer(texts)
    part = [("test", text) for text in texts]
    corpus = Corpus(encode(tokenizer, part), np.zeros(0, np.uint16), token_spellings(tokenizer), {})
    assert corpus.as_bytes(corpus.train).tobytes() == b"".join(text.encode() + b"\0" for text in texts)
