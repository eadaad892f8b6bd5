"""Updates that BF16 weights lose in full fine-tuning, with FP32 masters and without; and the memory of each way.

    python benchmarks/master_weights.py --size 1b --out benchmarks/results/DATE-masters.json      # a GPU, a minute
    python benchmarks/master_weights.py --size tiny                                                     # a CPU

One decoder, the same weights and batches for every way, AdamW, 20 steps at a learning rate of 1e-5. Two runs to compare
with: FP32 weights whose forward and backward see them rounded to BF16 (`FP32 copies`), and FP32 weights under torch's
autocast, as `TrainingArguments(bf16=True)` trains a model that was loaded in FP32. Printed for each way: the cosine of
its whole move with theirs, the share of elements that moved in the first step and in all, bytes a parameter (weights,
gradients, states), the peak of a GPU's memory, and the time of an optimiser's step.

The second comparison has a bound of its own: two forwards in different precisions have different gradients, and in the
first steps Adam moves a weight by the sign of its gradient, however small. `FP32 copies` in that column is the bound.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from octavo.numerics.split import join
from octavo.optim import build_optimizer, keep_masters
from octavo.optim.split_masters import LOW
from octavo.tools.bench.random_model import build_causal_lm
from octavo.tools.shapes import LLAMAS

LR, STEPS = 1e-5, 20
LLAMA = {"model_type": "llama", "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
SIZES: dict[str, tuple[dict[str, int], int, int]] = {  # shape, layers, tokens of a step
    "tiny": ({"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
              "vocab_size": 512}, 2, 512),
    "small": ({"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4,
               "vocab_size": 8192}, 4, 1024),
    "1b": ({name: LLAMAS["1b"][name] for name in FIELDS}, 16, 4096),
}  # fmt: skip
SEQUENCE = 256


class Copies:
    """FP32 copies of all weights, and their FP32 gradients, beside BF16 weights: 16 bytes per parameter."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.copies = [nn.Parameter(p.detach().float()) for p in parameters]
        self.optimizer = torch.optim.AdamW(self.copies, lr=LR, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for copy, p in zip(self.copies, self.parameters, strict=True):
            copy.grad, p.grad = p.grad.float() if p.grad is not None else None, None
        self.optimizer.step()
        for copy, p in zip(self.copies, self.parameters, strict=True):
            copy.grad = None
            p.copy_(copy)

    @property
    def state(self) -> Any:
        return {p: {**self.optimizer.state[c], "copy": c} for p, c in zip(self.parameters, self.copies, strict=True)}


class Kahan:
    """BF16 weights with the error of the last rounding in BF16, and BF16 moments, by AdamW's equations: 10 bytes."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.state = {p: {n: torch.zeros_like(p) for n in ("exp_avg", "exp_avg_sq", "rest")} for p in parameters}
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        for p in self.parameters:
            if p.grad is None:
                continue
            g, state = p.grad.float(), self.state[p]
            mean = state["exp_avg"].float().lerp(g, 0.1)
            square = state["exp_avg_sq"].float().lerp(g.square(), 0.001)
            state["exp_avg"].copy_(mean)
            state["exp_avg_sq"].copy_(square)
            mean /= 1 - 0.9**self.count
            square /= 1 - 0.999**self.count
            exact = (p.float() + state["rest"].float()) * (1 - LR * 0.01) - LR * mean / (square.sqrt() + 1e-8)
            p.copy_(exact)
            state["rest"].copy_(exact - p.float())


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


def with_masters(build: Callable[[list[nn.Parameter]], Any]) -> Callable[[list[nn.Parameter]], Any]:
    def built(parameters: list[nn.Parameter]) -> Any:
        keep_masters(parameters)
        return build(parameters)

    return built


def low_bit(name: str, *, stochastic: bool = False) -> Callable[[list[nn.Parameter]], Any]:
    return lambda p: build_optimizer(name, p, LR, 0.01, (0.9, 0.999), stochastic_rounding=stochastic)


REFERENCE, AUTOCAST, DEFAULT = "FP32 copies", "FP32 weights, autocast", "BF16, FP32 masters in halves (default)"
WAYS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    REFERENCE: Copies,
    AUTOCAST: adamw,
    "BF16": adamw,
    "BF16, rounded stochastically": low_bit("adamw", stochastic=True),
    "BF16, Kahan, BF16 means": Kahan,
    DEFAULT: with_masters(adamw),
    "the same, 8-bit means": with_masters(low_bit("adamw8bit")),
    "the same, 4-bit means": with_masters(low_bit("adamw4bit")),
}


def batches(size: str, device: str) -> Iterator[Tensor]:
    """Return learnable tokens: each follows from the one before, with some noise."""
    shape, _, tokens = SIZES[size]
    generator = torch.Generator().manual_seed(1)
    rows, vocabulary = tokens // SEQUENCE, shape["vocab_size"]
    for _ in range(STEPS):
        ids = torch.empty(rows, SEQUENCE, dtype=torch.long)
        ids[:, 0] = torch.randint(vocabulary, (rows,), generator=generator)
        noise = torch.randint(16, (rows, SEQUENCE), generator=generator)
        for i in range(1, SEQUENCE):
            ids[:, i] = (ids[:, i - 1] * 31 + noise[:, i]) % vocabulary
        yield ids.to(device)


def values(optimizer: Any, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return copies of the weights, in the precision in which they are trained."""
    if isinstance(optimizer, Copies):
        return [c.detach().clone() for c in optimizer.copies]
    if isinstance(optimizer, Kahan):
        return [p.detach().float() + optimizer.state[p]["rest"].float() for p in parameters]
    lows = [optimizer.state[p].get(LOW) for p in parameters]
    return [_copy(p) if low is None else join(p.detach(), low) for p, low in zip(parameters, lows, strict=True)]


def run(way: str, size: str, device: str) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the figures of one way, and its updates."""
    shape, layers, _ = SIZES[size]
    torch.manual_seed(0)
    model = build_causal_lm(LLAMA | shape, layers=layers, positions=SEQUENCE, device=device)
    if way == AUTOCAST:
        model.float()
    parameters = list(model.parameters())
    start = [_copy(p) for p in parameters]
    # These are there for the comparison only.
    beside = torch.cuda.memory_allocated() - sum(p.nbytes for p in parameters) if device == "cuda" else 0
    optimizer = WAYS[way](parameters)
    context: Any = torch.autocast(device, torch.bfloat16) if way == AUTOCAST else nullcontext()
    count = sum(p.numel() for p in parameters)
    first, seconds = 0.0, []
    for number, ids in enumerate(batches(size, device)):
        with context:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        _wait(device)
        began = time.perf_counter()
        optimizer.step()
        _wait(device)
        seconds.append(time.perf_counter() - began)
        model.zero_grad()
        if number == 0:
            first = _share_moved(values(optimizer, parameters), start)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
    peak = torch.cuda.max_memory_allocated() - beside if device == "cuda" else None
    after = values(optimizer, parameters)
    moves = [a.sub_(b) for a, b in zip(after, start, strict=True)]
    states = [x for p in parameters for x in optimizer.state[p].values() if isinstance(x, Tensor) and x.dim()]
    total_bytes = sum(p.nbytes * 2 for p in parameters) + sum(_bytes(x) for x in states)
    return {
        "way": way,
        "loss": loss.item(),
        "moved in the first step": first,
        "moved in all": sum(int(m.count_nonzero()) for m in moves) / count,
        "bytes a parameter": total_bytes / count,
        "peak GiB": None if peak is None else peak / 2**30,
        "step ms": 1e3 * sorted(seconds)[len(seconds) // 2],
    }, moves


def _copy(p: Tensor) -> Tensor:
    return p.detach().to(torch.float32, copy=True)


def _share_moved(after: list[Tensor], before: list[Tensor]) -> float:
    return sum(int((a != b).sum()) for a, b in zip(after, before, strict=True)) / sum(a.numel() for a in after)


def _bytes(x: Any) -> int:
    if not hasattr(x, "__tensor_flatten__"):
        return int(x.nbytes)
    return sum(_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def cosine(a: list[Tensor], b: list[Tensor], device: str) -> float:
    dots = torch.zeros(3, dtype=torch.float64)
    for x, y in zip(a, b, strict=True):
        x, y = x.to(device).flatten(), y.to(device).flatten()
        dots += torch.stack([x @ y, x @ x, y @ y]).double().cpu()
    return float(dots[0] / (dots[1] * dots[2]).sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description="What BF16 weights lose of their updates, and what masters cost.")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", help="parts of names of ways; both references always run")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    wanted = [w for w in WAYS if w in (REFERENCE, AUTOCAST) or not options.only or any(o in w for o in options.only)]
    rows, references = [], {}
    for way in wanted:
        figures, moves = run(way, options.size, options.device)
        if way in (REFERENCE, AUTOCAST):
            references[way] = moves
        for name, reference in references.items():
            figures[f"cosine with {name}"] = cosine(moves, reference, options.device)
        rows.append(figures)
        del moves
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    rows[0][f"cosine with {AUTOCAST}"] = cosine(references[REFERENCE], references[AUTOCAST], options.device)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    title = f"{options.size}, {device}, torch {torch.__version__}, {date.today()}: {STEPS} steps at lr {LR:g}"
    table = Table(title=title, title_justify="left")
    for name in rows[-1]:
        table.add_column(name, justify="left" if name == "way" else "right")
    for row in rows:
        table.add_row(*(x if isinstance(x, str) else "–" if x is None else f"{x:.4f}" for x in row.values()))
    Console(width=180).print(table)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"title": title, "size": options.size, "steps": STEPS, "lr": LR, "ways": rows}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
