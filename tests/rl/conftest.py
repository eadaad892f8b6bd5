"""A tiny Llama on bytes, prompts and rewards for it: nothing to download."""

import commands
import pytest
import torch
from decoder_cases import build
from rl_cases import REWARDS
from trainer_cases import BYTES, byte_tokenizer

commands._CONTEXT.set_forkserver_preload(["torch._dynamo", "octavo.cli", "octavo.grpo.run", "octavo.hf.lora"])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products this small only lose by being shared
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    build(vocab_size=BYTES, max_position_embeddings=32, eos_token_id=1).bfloat16().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "say {i}:", "answer": "{i}"}}\n' for i in range(6)))
    return str(path)


@pytest.fixture
def rewards(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return str(path)
