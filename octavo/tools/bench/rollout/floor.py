"""The floor of a rollout: the time that a decode step takes if memory is all that it waits for.

A step writes one token to each of S slots, which are groups of n completions of a prompt of P tokens. Over a run of T
new tokens, a step reads

    weights    every linear of the layers once, one byte (FP8, with its scales) or two (BF16) a weight
    adapters   A and B of each target in BF16: rank · (inputs + outputs) · 2 bytes
    head       in BF16
    prefix     keys and values of S / n prompts of P tokens: a prompt is read once for all of its completions
    suffix     keys and values of S completions, which are T / 2 tokens long on average

    step   = max(bytes / bandwidth, FLOPs / rate) of the linears with their adapters
           + max(bytes / bandwidth, FLOPs / rate) of the head
           + (prefix + suffix) / bandwidth
    floor  = S / step, in tokens a second

A token of the cache is 2 · layers · KV heads · head width values, of two bytes, or of one with an FP32 scale for each
token and head. FLOPs are 2 · S for each weight: with many slots arithmetic binds, at the rate of BF16 where products
take activations as they are, whatever the weights are. Norms, embedding rows and the prompts' own forward are left out.

The bandwidth is that of a copy in the same run (`kernels.copy_bandwidth`), which reads and writes: a kernel that only
reads may be a little faster. Beside it stands the data sheet's.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from octavo.numerics.quantize import BLOCK
from octavo.tools.bench.gemm import Gemm, gemm_rates
from octavo.tools.bench.kernels import copy_bandwidth
from octavo.tools.bench.rollout.ways import Way
from octavo.tools.rollouts import BF16, FP32, Size, kv_bytes
from octavo.tools.shapes import Case, usual_tokens


@dataclass(frozen=True)
class Rates:
    """Rates of a device: TB/s of its memory, and TFLOP/s of products in BF16 and in FP8 (None: it has none)."""

    tb_per_s: float
    bf16: float
    fp8: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# The data sheet's bandwidth; arithmetic as we measured it, since no power limit allows what the data sheet says.
DATASHEETS = {"NVIDIA H200": Rates(4.8, 790.0, 1340.0)}


@dataclass(frozen=True)
class Floor:
    """Bytes that a step reads, by kind, and the seconds that this takes."""

    read: Mapping[str, float]
    seconds: float
    tokens_per_s: float

    def to_dict(self) -> dict[str, Any]:
        return {"bytes": dict(self.read), "step_s": self.seconds, "tokens_per_s": self.tokens_per_s}


def read_bytes(case: Case, size: Size, *, recipe: str | None, fp8_kv: bool) -> dict[str, float]:
    """Return the bytes that an average step reads, by kind. `recipe`: granularity of FP8 weights; None: BF16."""
    layers = [linear for linear in case.linears if linear.name != "head"]
    weights = sum(linear.parameters for linear in layers)
    scales = {
        None: 0,
        "channel": sum(linear.n * linear.count for linear in layers),
        "block": sum(-(-linear.n // BLOCK) * -(-linear.k // BLOCK) * linear.count for linear in layers),
    }[recipe]
    token = kv_bytes(case, fp8=fp8_kv)
    return {
        "weights": weights * BF16 if recipe is None else weights + scales * FP32,
        "adapters": case.adapter_parameters * BF16,
        "head": (case.matmul_parameters - weights) * BF16,
        "prefix": size.prompts * size.prompt * token,
        "suffix": size.slots * size.new_tokens / 2 * token,
    }


def floor_of(
    case: Case, size: Size, rates: Rates, *, recipe: str | None, fp8_kv: bool = False, fp8_products: bool = False
) -> Floor:
    """Return the floor of a rollout. `fp8_products`: FP8 weights by activations in FP8."""
    read = read_bytes(case, size, recipe=recipe, fp8_kv=fp8_kv)
    head = int(read["head"]) // BF16
    linears = case.matmul_parameters - head
    rate = rates.fp8 if fp8_products and rates.fp8 is not None else rates.bf16

    def seconds(moved: float, parameters: int, rate: float) -> float:
        return max(moved / rates.tb_per_s, 2 * size.slots * parameters / rate) / 1e12

    in_layers = seconds(read["weights"] + read["adapters"], linears, rate)
    in_cache = (read["prefix"] + read["suffix"]) / rates.tb_per_s / 1e12
    step = in_layers + seconds(read["head"], head, rates.bf16) + in_cache
    return Floor(read, step, size.slots / step)


def floor_of_way(case: Case, size: Size, rates: Rates, way: Way) -> Floor:
    """Return the floor of a way to generate."""
    return floor_of(case, size, rates, recipe=way.recipe, fp8_kv=way.fp8_kv, fp8_products=way.fp8_products)


def measure_rates(case: Case) -> Rates:
    """Return what this device does, measured now: a copy, and the largest of a layer's products, gate and up."""
    linear = next(linear for linear in case.linears if linear.name == "gate_up")
    products = gemm_rates(Gemm(linear.name, "y", usual_tokens(case.name), linear.n, linear.k), case)
    assert products["bf16"] is not None
    rates = Rates(copy_bandwidth(case.device), products["bf16"], products["fp8"])
    if case.device == "cuda":
        torch.cuda.empty_cache()
    return rates
