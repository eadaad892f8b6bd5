"""One training run of the parity experiment: a model from a seed, its precision, every step, the held-out loss.

What all runs of a task share: the initial weights, the batches and their order, AdamW (fused, betas 0.9 / 0.95, weight
decay 0.1), gradients clipped to norm 1, a straight warm-up, then a cosine down to exactly 0 at the last step.
Parameters are FP32 and the rest runs under `torch.autocast(bfloat16)`, in every run. What differs:

    bf16              nothing else
    bf16-noise1, 2    initial weights w · (1 + 2⁻⁹ · N(0, 1)): one rounding of BF16, to see how far luck alone carries
    delayed, …        the products in FP8: BDH under `octavo.fp8_autocast`, Llama's linears by `octavo.convert_to_fp8`
    …+adamw4bit, …    any of these with another optimiser of `octavo.optim`
    …-seed1, …        any of these with other initial weights and other batches, for a comparison seed by seed

Nothing waits for the device but a look every `CHECK` steps: is the loss finite, will the time suffice.

The held-out loss is taken with gradients enabled, without a backward: it is the very graph that was trained, with the
scales it was trained with. Under `no_grad` a compiled autocast would trace its products anew, each with a fresh scale.
A model trained in FP8 is then evaluated in BF16, too: what it would score where it is served like that.
"""

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import octavo
from octavo import FP8TrainingConfig
from octavo.models import BDH, BDHConfig
from octavo.optim import build_optimizer, set_learning_rate
from octavo.tools.shapes import LLAMAS

BF16 = ("bf16", "bf16-noise1", "bf16-noise2")
FP8 = {
    "delayed": FP8TrainingConfig.from_recipe("delayed"),
    "block": FP8TrainingConfig.from_recipe("block"),
    "channel": FP8TrainingConfig.from_recipe("channel"),
    "current": FP8TrainingConfig.from_recipe("current"),
    "mx": FP8TrainingConfig.from_recipe("mx"),
    "e5m2": FP8TrainingConfig(fp8_format="E5M2"),
}
# To find out what a difference comes from; run when named.
VARIANTS = {
    "delayed-sums-in-fp32": FP8TrainingConfig(fast_accumulation="none"),
    "delayed-fast-forward": FP8TrainingConfig(fast_accumulation="forward"),
    "delayed-e4m3": FP8TrainingConfig(fp8_format="E4M3"),
    "channel-sums-in-fp32": FP8TrainingConfig.from_recipe("channel", fast_accumulation="none"),
    "channel-e4m3": FP8TrainingConfig.from_recipe("channel", fp8_format="E4M3"),
    "block-hybrid": FP8TrainingConfig.from_recipe("block", fp8_format="HYBRID"),
    "delayed-fp8-activations": FP8TrainingConfig(activations="fp8"),
}
FP8 |= VARIANTS
NOISE = 2.0**-9
CHECK = 25
WARM = 10  # steps not timed: they compile
SEED = 0
LLAMA_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
LLAMA_1B = {name: LLAMAS["1b"][name] for name in LLAMA_TINY}


@dataclass(frozen=True)
class Task:
    """One model and how it is trained. `unit` is what a token is."""

    name: str
    unit: str
    shape: dict[str, Any]
    steps: int
    batch: int
    sequence: int
    lr: float
    warmup: int
    held_out_tokens: int

    def rate(self, step: int) -> float:
        """Return the rate of step 1, 2, …, steps."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(self.steps - self.warmup, 1)))


@dataclass(frozen=True)
class Data:
    """A task's text on the device, [n] each."""

    train: Tensor
    held_out: Tensor

    @classmethod
    def put(cls, train: np.ndarray, held_out: np.ndarray, device: torch.device) -> "Data":
        dtype = np.uint8 if train.dtype == np.uint8 else np.int32  # CUDA hardly knows uint16
        return cls(*(torch.tensor(part.astype(dtype, copy=False), device=device) for part in (train, held_out)))

    def train_starts(self, task: Task, seed: int = SEED) -> Tensor:
        """Return the starts of every step's sequences, [steps, batch, 1]; drawn on the CPU, so alike everywhere."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.train) - task.sequence, (task.steps, task.batch, 1), generator=generator)
        return starts.to(self.train.device)

    def held_out_starts(self, task: Task) -> Tensor:
        """Return starts of sequences without overlap, spread evenly over the part, [batches, batch, 1]."""
        batches = math.ceil(task.held_out_tokens / (task.batch * (task.sequence - 1)))
        count = batches * task.batch
        if count * (task.sequence + 1) > len(self.held_out):
            raise SystemExit(f"{task.name}: {len(self.held_out):,} held-out {task.unit}s are too few to evaluate on")
        starts = torch.arange(count) * (len(self.held_out) - task.sequence - 1) // max(count - 1, 1)
        return starts.view(batches, task.batch, 1).to(self.held_out.device)


def split_run(run: str) -> tuple[str, str, int]:
    """Split `block+adamw4bit-seed2` into `block`, that optimiser and seed 2."""
    name, _, seed = run.partition("-seed")
    recipe, _, optimizer = name.partition("+")
    return recipe, optimizer or "adamw", int(seed) if seed else SEED


def build(optimizer: str, task: "Task", parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": task.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if optimizer == "adamw":
        return torch.optim.AdamW(parameters, **options, fused=True)
    return build_optimizer(optimizer, parameters, **options)


class PreparedModel:
    """A task's model in the precision of one run."""

    def __init__(self, task: Task, run: str, device: torch.device, compile_backend: str | None) -> None:
        run, _, seed = split_run(run)
        torch.manual_seed(seed)
        self.device = device
        self.is_bdh = task.name == "bdh"
        self.model: nn.Module = build_bdh(task.shape, device) if self.is_bdh else build_llama(task.shape, device)
        if run in BF16[1:]:
            add_noise(self.model, seed=BF16.index(run))
        self.autocast: octavo.FP8Autocast | None = None
        self.report = None
        if run not in BF16 and self.is_bdh:
            self.autocast = octavo.fp8_autocast(FP8[run], model=self.model)
            self.report, self.scaling = self.autocast.report, self.autocast.scaling
        elif run not in BF16:
            self.report = octavo.convert_to_fp8(self.model, FP8[run])
            self.scaling = self.report.scaling
        self.forward = self.model
        if compile_backend and self.is_bdh:
            self.forward = torch.compile(self.model, dynamic=False, backend=compile_backend)
        elif compile_backend:
            for layer in self.model.model.layers:
                layer.compile(dynamic=False, backend=compile_backend)

    def loss(self, window: Tensor) -> Tensor:
        """Return the loss of sequences [batch, sequence + 1]. Llama shifts by itself, and predicts one token less."""
        tokens, targets = window[:, :-1], window[:, 1:]
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(self.device.type, torch.bfloat16))
            if self.autocast is not None:
                stack.enter_context(self.autocast)
            if self.is_bdh:
                return self.forward(tokens, targets)[1]
            return self.forward(input_ids=tokens, labels=tokens).loss

    def leave_fp8(self) -> None:
        """Continue for good with the trained weights in BF16."""
        if self.autocast is not None:
            self.autocast = None
        else:
            octavo.restore(self.model)
        self.forward = self.model

    def fp8_figures(self) -> dict[str, Any]:
        """Return the products in FP8, and mean and largest share of underflow and saturation over all steps."""
        if self.report is None:
            return {}
        if not self.report.in_fp8:
            raise RuntimeError("nothing ran in FP8: this run would have compared BF16 with BF16")
        figures: dict[str, Any] = {"report": self.report.summary()}
        statistics = self.scaling.statistics()
        for quantity in ("underflow", "saturated") if statistics else ():
            values = {name: entry[quantity] for name, entry in statistics.items()}
            worst = max(values, key=values.__getitem__)
            figures[quantity] = {"mean": sum(values.values()) / len(values), "max": values[worst], "max_at": worst}
        return figures


def build_bdh(shape: dict[str, Any], device: torch.device) -> nn.Module:
    return BDH(BDHConfig(**shape)).to(device)


def build_llama(shape: dict[str, Any], device: torch.device) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape, use_cache=False, attn_implementation="sdpa")
    with device:
        return LlamaForCausalLM(config).float().train()


@torch.no_grad()
def add_noise(model: nn.Module, seed: int) -> None:
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        parameter.mul_(1 + NOISE * noise)


def train(
    task: Task, run: str, data: Data, *, device: torch.device, compile_backend: str | None, deadline: float
) -> dict[str, Any]:
    """Train and evaluate once. The result's `status`: complete, nan, or out of budget (both stopped early)."""
    began = time.perf_counter()
    prepared = PreparedModel(task, run, device, compile_backend)
    parameters = list(prepared.model.parameters())
    result: dict[str, Any] = {
        "task": task.name,
        "run": run,
        "status": "complete",
        "parameters": sum(p.numel() for p in parameters),
        "initial_weights_sum": sum(p.detach().double().sum().item() for p in parameters),
    }
    _, optimizer_name, seed = split_run(run)
    optimizer = build(optimizer_name, task, parameters)
    starts, offsets = data.train_starts(task, seed), torch.arange(task.sequence + 1, device=device)
    losses, norms = torch.zeros(2, task.steps, device=device).unbind()
    evaluation_s = 0.0
    for step in range(1, task.steps + 1):
        set_learning_rate(optimizer, task.rate(step))
        loss = prepared.loss(data.train[starts[step - 1] + offsets].long())
        loss.backward()
        norms[step - 1] = nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[step - 1] = loss.detach()

        if step not in (WARM, task.steps) and step % CHECK:
            continue
        finite = bool((losses[:step].isfinite() & norms[:step].isfinite()).all())  # waits for the device
        now = time.perf_counter()
        if step == WARM:
            warm = now
            result["startup_s"] = now - began
        elif step > WARM:
            result["ms_per_step"] = 1000 * (now - warm) / (step - WARM)
            # A forward is about a third of a step.
            evaluation_s = task.held_out_tokens / (task.batch * task.sequence) * result["ms_per_step"] / 3000
        if not finite:
            result["status"] = "nan"
        elif step > WARM and now + (task.steps - step) * result["ms_per_step"] / 1000 + evaluation_s > deadline:
            result["status"] = "out of budget"
        if step % 100 == 0 or result["status"] != "complete":
            print(f"  {task.name} {run}: step {step}, loss {loss.item():.4f}, {result.get('ms_per_step', 0):.1f} ms")
        if result["status"] != "complete":
            break

    result |= {"steps": step, "curve": curve(losses[:step]), "largest_grad_norm": finite_or_none(norms[:step].max())}
    result |= prepared.fp8_figures()
    if result["status"] == "complete":
        result["held_out_loss"], result["held_out_tokens"] = evaluate(prepared, task, data)
        if result["held_out_loss"] is None:
            result["status"] = "nan"
        if prepared.report is not None:
            prepared.leave_fp8()
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                result["held_out_loss_in_bf16"], _ = evaluate(prepared, task, data)
    if device.type == "cuda":
        result["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    result["seconds"] = time.perf_counter() - began
    return result


def evaluate(prepared: PreparedModel, task: Task, data: Data) -> tuple[float | None, int]:
    """Return the mean loss on held-out text, and the number of predictions."""
    offsets = torch.arange(task.sequence + 1, device=data.held_out.device)
    starts = data.held_out_starts(task)
    losses = [prepared.loss(data.held_out[batch + offsets].long()).detach() for batch in starts]
    predictions = task.sequence if prepared.is_bdh else task.sequence - 1
    return finite_or_none(torch.stack(losses).double().mean()), starts.numel() * predictions


def curve(losses: Tensor, every: int = 10) -> dict[str, list[Any]]:
    """Return the mean of every ten losses, at the step of the last of them."""
    parts = losses.double().split(every)
    ends = np.cumsum([len(part) for part in parts])
    return {"step": ends.tolist(), "loss": [finite_or_none(part.mean()) for part in parts]}


def finite_or_none(value: Tensor) -> float | None:
    """Replace non-finite numbers, which JSON lacks, by None."""
    number = value.item()
    return number if math.isfinite(number) else None
