"""The run without arguments: a small decoder learns to sort digits, from rewards alone.

    4172>1247        a prompt up to `>`, then its completion; 10,000 different prompts

A model of 84,000 weights is made on this machine, from examples of which two thirds are wrong: the same digits, in any
order. That takes a minute. Sampled from, it gives the right order in a good third of its completions, as its examples
do. GRPO then sees no example any more: it completes prompts, and a function says which of the completions are sorted.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.dist.durable import sync_folder
from octavo.rl.rewards import Rewards
from octavo.rl.tasks import Task
from octavo.training.files import disk_errors

DIGITS = 4
WRONG = 0.65  # of the examples
STEPS, BATCH, RATE, RISE = 600, 128, 2e-3, 50
LETTERS = ["<pad>", "<eos>", *"0123456789>"]
PAD, EOS, FIRST = 0, 1, 2
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 16,
    "max_position_embeddings": 32,
}
PROMPTS = 2048


def sorts(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Give 1 for the prompt's digits in order, and nothing else; 0 for anything else."""
    return [
        float(completion == "".join(sorted(prompt.rstrip(">"))))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread: products this small only lose by being shared, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def sorting_task(seed: int) -> Task:
    """Return the task: prompts of digits, and a reward of 1 or 0."""
    generator = torch.Generator().manual_seed(seed + 1)
    digits = torch.randint(0, 10, (PROMPTS, DIGITS), generator=generator).tolist()
    rows = [{"prompt": "".join(map(str, row)) + ">"} for row in digits]
    return Task("sorting", rows, Rewards([sorts]), f"{PROMPTS:,} prompts of {DIGITS} digits to sort")


def make_base(folder: Path, seed: int, *, steps: int = STEPS, progress: Callable[[int, float], None]) -> None:
    """Train the small decoder on examples, most of them wrong, and write it to a folder, whole or not at all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, pad_token_id=PAD, bos_token_id=None, eos_token_id=EOS, tie_word_embeddings=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        rate = RATE * min(1.0, (step + 1) / RISE) * (0.5 * (1 + math.cos(math.pi * step / steps)) + 0.02)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, labels = _examples(generator)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress(step + 1, loss.item())
    unfinished = folder.with_name(folder.name + ".tmp")
    with disk_errors(folder):
        shutil.rmtree(unfinished, ignore_errors=True)
        model.bfloat16().save_pretrained(unfinished)
        tokenizer().save_pretrained(unfinished)
        unfinished.rename(folder)
        sync_folder(folder.parent)


def tokenizer() -> Any:
    """Return a tokenizer of digits, a token each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token=LETTERS[PAD], eos_token=LETTERS[EOS])


def _examples(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return rows of digits, `>`, an answer and the end, and labels of the answers."""
    digits = torch.randint(0, 10, (BATCH, DIGITS), generator=generator)
    shuffled = digits.gather(1, torch.rand(BATCH, DIGITS, generator=generator).argsort(dim=1))
    is_wrong = torch.rand(BATCH, 1, generator=generator) < WRONG
    answers = torch.where(is_wrong, shuffled, digits.sort(dim=1).values)
    arrow, end = (torch.full((BATCH, 1), token) for token in (LETTERS.index(">"), EOS))
    ids = torch.cat([digits + FIRST, arrow, answers + FIRST, end], dim=1)
    labels = ids.clone()
    labels[:, : DIGITS + 1] = -100
    return ids, labels
