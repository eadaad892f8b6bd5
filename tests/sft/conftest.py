"""A tiny Llama on bytes, and data to fine-tune it on: nothing to download."""

import json
import random

import commands
import pytest
import torch
from decoder_cases import build
from sft_cases import TEMPLATE
from trainer_cases import BYTES, byte_tokenizer

commands._CONTEXT.set_forkserver_preload(["torch._dynamo", "octavo.cli", "octavo.sft.run", "octavo.hf.lora"])

WORDS = ["red", "green", "blue", "fox", "dog", "cat", "runs", "jumps", "over", "the", "lazy"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products this small only lose by being shared
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    build(vocab_size=BYTES, max_position_embeddings=96).bfloat16().save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """32 examples of a prompt and its completion."""
    choose = random.Random(0)
    phrases = [" ".join(choose.choices(WORDS, k=choose.randint(1, 6))) for _ in range(32)]
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{p} =", "completion": f" {p[::-1]}"}) + "\n" for p in phrases))
    return str(path)
