"""Whole steps of GRPO by `octavo.rl.grpo` itself: rollout, rewards, old log-probabilities, updates.

Prompts are random tokens, rewards random numbers from the seed: what a step computes does not depend on either. With
two or more mini-batches, a pass over all sequences computes old log-probabilities before the first update, as it does
in a run; with one, the update's own forward has them. The first step compiles and allocates; it is not timed. Adapters
are in BF16, AdamW's states too.
"""

import statistics
from typing import Any

import torch

from octavo.rl.engine import NativeEngine
from octavo.rl.grpo import GRPO
from octavo.rl.products import set_products
from octavo.rl.rewards import Rewards
from octavo.rl.settings import GRPOSettings
from octavo.rl.tasks import Task
from octavo.tools.bench.rollout.measure import MemoryMeter, make_prompts
from octavo.tools.bench.rollout.ways import Way
from octavo.tools.rollouts import Size
from octavo.tools.shapes import Case


class _Tokenizer:
    """Tokens of numbered prompts, and no text: nothing is read."""

    chat_template = None

    def __init__(self, prompts: list[list[int]]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return 1

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self._prompts[int(text)]}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return str(len(tokens))


def measure_steps(
    model: Any,
    case: Case,
    way: Way,
    size: Size,
    *,
    steps: int,
    mini_batches: int = 2,
    micro_batch_tokens: int = 8192,
    standby: bool = True,
) -> dict[str, Any]:
    """Return the seconds of whole steps and of their parts, memory, and the gap, ready for JSON."""
    memory = MemoryMeter(case.device)
    prompts = make_prompts(case, size)
    generator = torch.Generator().manual_seed(case.seed)

    def reward(completions: list[str]) -> list[float]:
        return torch.rand(len(completions), generator=generator).tolist()

    task = Task("random", [{"prompt": str(i)} for i in range(len(prompts))], Rewards([reward]))
    settings = GRPOSettings(
        steps=steps + 1,
        prompts=size.prompts,
        completions=size.group,
        max_new_tokens=size.new_tokens,
        mini_batches=mini_batches,
        micro_batch_tokens=micro_batch_tokens,
        seed=case.seed,
    )
    if way.recipe is not None:
        set_products(model, way.training)
    kv_dtype = "fp8" if way.fp8_kv else "auto"
    engine = NativeEngine(model, slots=size.slots, max_length=size.length, kv_dtype=kv_dtype, products=way.products)
    run = GRPO(model, _Tokenizer(prompts), task, engine, settings, stop_ids=(), standby=standby)
    run.step(1)
    memory.start()
    rows = []
    for number in range(2, steps + 2):
        row, rollout = run.step(number)
        tokens = sum(len(each.tokens) for each in rollout.completions)
        if tokens != size.tokens:
            raise RuntimeError(f"{tokens} tokens were generated instead of {size.tokens}")
        rows.append(row)
    used = memory.read()
    cache_bytes = engine.statistics()["cache_bytes"]
    engine.standby()

    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    return {
        "times": [row["rollout_s"] + row["train_s"] for row in rows],
        **{name: median(name) for name in ("rollout_s", "train_s", "gap_mean", "gap_p99", "gap_clip", "loss")},
        "tokens": size.slots * size.length,
        "cache_bytes": cache_bytes,
        **used,
        **memory.after_standby(cache_bytes),
    }
