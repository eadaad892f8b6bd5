"""How accurate is one gradient? A Llama of the 1B shape early in training, and its gradient in every precision.

    python benchmarks/corpus.py                       # once: the text
    python benchmarks/gradients.py --out gradients.json

The reference is FP32 throughout. For each contender, on the same weights and the same batches:

    loss         mean over the batches, in percent of the reference
    error        |g − g₀| / |g₀|, over all linears of the layers
    projection   ⟨g, g₀⟩ / |g₀|²: below 1, the gradient is too short on average, which noise alone does not do
    mean error   the error of the mean gradient over the batches: random errors average out, a bias stays

`projection` and `error` are also given per kind of weight.
"""

import argparse
import copy
import datetime
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from corpus import DEFAULT, byte_corpus, load_corpus
from parity import TASKS, TINY, put_data
from parity_runs import FP8, build_llama
from torch import Tensor, nn

import octavo

CONTENDERS = ("bf16", "octavo-bf16", *(name for name in FP8 if name not in ("mx", "e5m2")))
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "norm")


def train_a_little(model: nn.Module, windows: Tensor, lr: float) -> float:
    """Train in BF16, with the learning rate rising over the first half."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step, window in enumerate(windows):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, 2 * (step + 1) / len(windows))
        with torch.autocast(window.device.type, torch.bfloat16):
            loss = model(input_ids=window, labels=window).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def gradients(model: nn.Module, windows: Tensor, scaling: Any, autocast: bool) -> Iterator[tuple[float, list[Tensor]]]:
    """Yield loss and gradients of each batch. Delayed scales see the batches once before, as they would in training."""
    for warm in (True, False) if scaling is not None else (False,):
        for window in windows:
            with torch.autocast(window.device.type, torch.bfloat16, enabled=autocast):
                loss = model(input_ids=window, labels=window).loss
            loss.backward()
            grads = [p.grad for p in model.parameters()]
            model.zero_grad(set_to_none=True)
            if scaling is not None:
                scaling.step()
            if not warm:
                yield loss.item(), grads


def kind_of(name: str) -> str:
    return next(kind for kind in KINDS if kind in name)


class Comparison:
    """Sums over parameters, by kind."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def add(self, name: str, g: Tensor, exact: Tensor) -> None:
        g, exact = g.double(), exact.double()
        sums = [((g - exact) ** 2).sum().item(), (g * exact).sum().item(), (exact * exact).sum().item()]
        old = self.sums.setdefault(kind_of(name), [0.0, 0.0, 0.0])
        self.sums[kind_of(name)] = [a + b for a, b in zip(old, sums, strict=True)]

    def errors(self, kinds: tuple[str, ...]) -> dict[str, float]:
        error, dot, norm = (sum(self.sums[kind][i] for kind in kinds) for i in range(3))
        return {"error": (error / norm) ** 0.5, "projection": dot / norm}

    def table(self) -> dict[str, Any]:
        every = self.errors(tuple(kind for kind in KINDS if kind.endswith("proj")))
        return every | {"kinds": {kind: self.errors((kind,)) for kind in KINDS}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--corpus", type=Path, default=DEFAULT)
    parser.add_argument("--steps", type=int, default=60, help="of training before the comparison")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes and text, to try the script itself")
    options = parser.parse_args()
    device = torch.device(options.device)
    here = Path(__file__).parent
    corpus = byte_corpus(sorted(here.glob("*.py"))) if options.tiny else load_corpus(options.corpus)
    task, data = put_data((TINY if options.tiny else TASKS)["llama"], corpus, device)
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(
        len(data.train) - task.sequence, (options.steps + options.batches, task.batch, 1), generator=generator
    )
    windows = data.train[starts.to(device) + torch.arange(task.sequence, device=device)].long()
    torch.manual_seed(0)
    model = build_llama(task.shape, device)
    began = time.perf_counter()
    loss = train_a_little(model, windows[: options.steps], task.lr)
    windows = windows[options.steps :]
    print(f"{options.steps} steps of BF16: loss {loss:.3f}, {time.perf_counter() - began:.0f} s", flush=True)

    names = [name for name, _ in model.named_parameters()]
    exact = [(loss, gs) for loss, gs in gradients(model, windows, None, False)]
    exact_loss = sum(loss for loss, _ in exact) / len(exact)
    exact_mean = [sum(gs[i] for _, gs in exact) / len(exact) for i in range(len(names))]
    results: dict[str, Any] = {}
    for contender in options.contenders.split(","):
        began = time.perf_counter()
        converted, scaling = copy.deepcopy(model), None
        if contender == "octavo-bf16":
            octavo.convert_to_fp8(converted, precision="bf16")
        elif contender != "bf16":
            scaling = octavo.convert_to_fp8(converted, FP8[contender]).scaling
        single, mean, losses = Comparison(), Comparison(), []
        total: list[Tensor] | None = None
        for (loss, gs), (_, gs0) in zip(gradients(converted, windows, scaling, True), exact, strict=True):
            losses.append(loss)
            for name, g, g0 in zip(names, gs, gs0, strict=True):
                single.add(name, g, g0)
            total = gs if total is None else [a + b for a, b in zip(total, gs, strict=True)]
        assert total is not None
        for name, g, g0 in zip(names, total, exact_mean, strict=True):
            mean.add(name, g / len(losses), g0)
        off = 100 * (sum(losses) / len(losses) / exact_loss - 1)
        result = {"loss_percent": off, **single.table(), "mean": mean.table()}
        results[contender] = result
        print(
            f"{contender:22s} loss {off:+.3f} %   error {result['error']:.4f}   projection {result['projection']:.4f}"
            f"   of the mean: {result['mean']['error']:.4f}   {result['mean']['projection']:.4f}   "
            + " ".join(f"{kind[:4]} {v['error']:.3f}/{v['projection']:.3f}" for kind, v in result["kinds"].items())
            + f"   {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        del converted
    if options.out:
        about = {"date": str(datetime.date.today()), "torch": torch.__version__, "steps": options.steps}
        about["gpu"] = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        options.out.write_text(json.dumps(about | {"contenders": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
