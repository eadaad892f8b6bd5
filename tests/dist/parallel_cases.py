"""Models under tensor parallelism, and the yardstick: the shards of all ranks as linears in one process.

A product that is parallel by rows is a sum of two products, and FP32 sums depend on their order. So what ranks compute
has the bits of `Halves`, whose linears are the halves that ranks have; a whole linear differs from it in the order of
sums, and, per tensor and per channel, in its scales.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import octavo

RECIPES = ("delayed", "current", "channel", "block", "mx")
WIDTH, HIDDEN = 256, 512  # whole blocks of 128 on each of two ranks
# Heads of 128, so that a rank's q, k and v end where blocks end.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 2,
         "head_dim": 128, "max_position_embeddings": 256, "num_hidden_layers": 1}  # fmt: skip


class Whole(nn.Module):
    """Two linears with biases around an activation, beside a residual stream."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Halves(nn.Module):
    """The same, as two ranks compute it."""

    def __init__(self) -> None:
        super().__init__()
        whole = Whole()
        rows, columns = whole.up.weight.chunk(2), whole.down.weight.chunk(2, dim=1)
        self.ups, self.downs = nn.ModuleList(), nn.ModuleList()
        for rank in range(2):
            up, down = nn.Linear(WIDTH, HIDDEN // 2), nn.Linear(HIDDEN // 2, WIDTH, bias=rank == 0)
            with torch.no_grad():
                up.weight.copy_(rows[rank])
                up.bias.copy_(whole.up.bias.chunk(2)[rank])
                down.weight.copy_(columns[rank])
                if rank == 0:
                    down.bias.copy_(whole.down.bias)
            self.ups.append(up)
            self.downs.append(down)

    def forward(self, x: Tensor) -> Tensor:
        same = x * 1  # the gradients of both halves are added before that of the residual stream
        first, second = (down(nn.functional.gelu(up(same))) for up, down in zip(self.ups, self.downs, strict=True))
        return x + (first + second)

    def numbers(self) -> dict[str, Any]:
        parts = {
            "up.weight": torch.cat([up.weight for up in self.ups]),
            "up.bias": torch.cat([up.bias for up in self.ups]),
            "down.weight": torch.cat([down.weight for down in self.downs], dim=1),
            "down.bias": self.downs[0].bias,
        }
        return {name: part.detach().numpy().copy() for name, part in parts.items()}


def numbers(model: nn.Module, *, gradients: bool = False) -> dict[str, Any]:
    """Every parameter, or its gradient, whole, as NumPy arrays."""
    found = {name: p.grad if gradients else p for name, p in model.named_parameters()}
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy().copy() for n, p in found.items()}


def distance(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """The norm of the difference, relative to that of what is expected; infinite where something is not finite."""
    assert actual.keys() == expected.keys()
    square = float(sum(((actual[n] - expected[n]).astype("float64") ** 2).sum() for n in expected))
    size = float(sum((expected[n].astype("float64") ** 2).sum() for n in expected))
    return (square / size) ** 0.5 if square == square else float("inf")


def tokens(step: int, shape: tuple[int, ...] = (2, 64, WIDTH)) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def train_linears(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        model(tokens(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def mesh(*sizes: int, names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", sizes or (2,), mesh_dim_names=names)


def parallel_linears(recipe: str, *, convert_first: bool, **options: Any) -> nn.Module:
    model = Whole(**options)
    even = model.up.out_features % 2 == 0  # else torch knows the parts of h as DTensors alone
    plan = {"up": ColwiseParallel(use_local_output=even), "down": RowwiseParallel()}
    if convert_first:
        octavo.convert_to_fp8(model, recipe)
    parallelize_module(model, mesh(), plan)
    if not convert_first:
        octavo.convert_to_fp8(model, recipe)
    return model


def decoder(**changes: Any) -> Any:
    import decoder_cases  # brings transformers

    return decoder_cases.build("Llama", **SIZES | changes)


def decoder_plan(model: Any, *, sequence: bool = False) -> dict[str, Any]:
    """The usual plan of a decoder; `sequence`: tokens are sharded between the products, too, as torchtitan has it."""
    after = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "lm_head": ColwiseParallel(input_layouts=after, output_layouts=Shard(-1), use_local_output=False)
    }
    for i in range(len(model.model.layers)):
        layer = f"model.layers.{i}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"{layer}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"{layer}.{name}"] = RowwiseParallel(output_layouts=after)
        if sequence:
            for name in ("input_layernorm", "post_attention_layernorm"):
                plan[f"{layer}.{name}"] = SequenceParallel()
            plan[f"{layer}.self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
            plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    if sequence:
        plan["model.norm"] = SequenceParallel(use_local_output=True)
        plan["model.layers.0"] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
    return plan


def batch(step: int = 0, rows: int = 2, length: int = 256, vocabulary: int = 160) -> dict[str, Tensor]:
    ids = torch.randint(1, vocabulary, (rows, length), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def gradients_of(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[float, dict[str, Any]]:
    """The loss and all gradients of one step."""
    model.zero_grad()
    output: Any = model(**inputs)
    assert getattr(output, "logits", None) is None or not octavo.convert.is_converted(model)
    output.loss.backward()
    return output.loss.item(), numbers(model, gradients=True)


class Wire(TorchDispatchMode):
    """Counts the bytes that this rank gives to collectives, by their kind."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        kind = next((k for k in ("gather", "reduce_scatter", "reduce") if k in name.replace("all_", "all")), None)
        if name.startswith(("c10d::", "_c10d_functional::")) and kind is not None:
            # c10d's gather and scatter take what they write first, and what they read second.
            given = args[1] if name.startswith("c10d::") and kind != "reduce" else args[0]
            given = given[0] if isinstance(given, list | tuple) else given
            self.sent[kind] += given.nbytes
            self.calls[kind] += 1
        return func(*args, **kwargs or {})
