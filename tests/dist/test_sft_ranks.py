"""`octavo sft` on two ranks, by TRL's trainer: the steps of one process; rank 0 writes and merges."""

import json
import random
import shutil

import pytest
from decoder_cases import build
from runs import Forked, rows
from trainer_cases import BYTES, byte_tokenizer

OPTIONS = ["--rank", "4", "--batch", "4", "--lr", "0.01", "--sample-tokens", "2", "--device", "cpu"]
OPTIONS += ["--save-interval", "2", "--merge", "fp8"]
WORDS = ["red", "green", "blue", "fox", "dog", "cat", "runs", "jumps", "over", "the", "lazy"]


@pytest.fixture
def request_for(tmp_path):
    """A tiny Llama on bytes, and examples."""
    build(vocab_size=BYTES, max_position_embeddings=96).bfloat16().save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    choose = random.Random(0)
    phrases = [" ".join(choose.choices(WORDS, k=choose.randint(1, 6))) for _ in range(32)]
    lines = [json.dumps({"prompt": f"{p} =", "completion": f" {p[::-1]}"}) + "\n" for p in phrases]
    (tmp_path / "pairs.jsonl").write_text("".join(lines))
    return [str(tmp_path / "llama"), str(tmp_path / "pairs.jsonl"), *OPTIONS]


def tune(world, folder, *arguments):
    codes, outputs, errors = Forked(world, *arguments, "--out", str(folder), command="sft").communicate()
    assert not any(codes), errors
    return outputs


def test_two_ranks_fine_tune_as_one(tmp_path, request_for):
    tune(1, tmp_path / "one", *request_for, "--steps", "4")
    outputs = tune(2, tmp_path / "two", *request_for, "--steps", "4")
    assert "Ranks: 2, each with 1 × 2 rows of a step" in outputs[0] and outputs[1] == ""
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert [row["tokens"] for row in one] == [row["tokens"] for row in two]
    # The same examples; scales per channel of half as many tokens, and BF16 sums in another order.
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=2e-3)
    assert {path.name for path in (tmp_path / "two").iterdir()} == {path.name for path in (tmp_path / "one").iterdir()}
    newest = tmp_path / "two" / "checkpoints" / "checkpoint-4"
    assert all(
        (newest / name).exists() for name in ("octavo_scaling_0.pt", "octavo_scaling_1.pt", "octavo-complete.json")
    )
    outputs = tune(2, tmp_path / "two", "--resume", "--merge", "16bit")  # complete: the results are written anew
    assert "Resuming after step 4" in outputs[0] and rows(tmp_path / "two") == two
    shutil.rmtree(newest)  # as if it had been stopped after step 2
    outputs = tune(2, tmp_path / "two", "--resume")
    assert "Resuming after step 2" in outputs[0]
    assert [figures(row) for row in rows(tmp_path / "two")] == [figures(row) for row in two]


def figures(row):
    return {name: value for name, value in row.items() if name != "tokens_per_s"}
