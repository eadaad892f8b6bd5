"""GEMMs at a model's shapes: the ceiling that a step is held against, and `octavo bench --gemm`.

A linear `y = x_MK · w_NKᵀ` is three NT products: y itself, `dx_MK = g_MN · w_NK` and `dw_NK = g_MNᵀ · x_MK`; each has
2·M·N·K FLOPs. The ceiling is the best rate that torch's own products reach over these shapes in this very run: one for
BF16 (`torch.mm`), one for FP8 (`torch._scaled_mm`, one scale per tensor, fast accumulation).
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.numerics import FP8TrainingConfig, Quantized
from octavo.numerics.config import OperandRecipe
from octavo.numerics.gemm import ALIGNMENT
from octavo.numerics.scaling import new_states
from octavo.support import has_fp8_tensor_cores
from octavo.tools.bench.result import FAILED, TIMED
from octavo.tools.bench.timing import device_time, try_device_time
from octavo.tools.shapes import Case, Linear

# The recipe and whether fast accumulation is allowed, for each column of `--gemm`.
KINDS: dict[str, tuple[str, bool]] = {
    "tensor, fast": ("current", True),
    "tensor": ("current", False),
    "row": ("channel", False),
    "row, fast": ("channel", True),
    "block": ("block", False),
}
CALLS = 3


@dataclass(frozen=True)
class Gemm:
    """One product `a_MK · b_NKᵀ`; `linear` and `which` name the linear and the pass."""

    linear: str
    which: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def tflops(self, seconds: float) -> float:
        return self.flops / seconds / 1e12


def gemms(case: Case) -> list[Gemm]:
    return [
        gemm
        for linear in case.linears
        for gemm in (
            Gemm(linear.name, "y", case.tokens, linear.n, linear.k),
            Gemm(linear.name, "dx", case.tokens, linear.k, linear.n),
            Gemm(linear.name, "dw", linear.n, linear.k, case.tokens),
        )
    ]


def measure_ceilings(case: Case) -> dict[str, Any]:
    """Return the best TFLOP/s of BF16 and of FP8 over the model's shapes; FP8 is None without tensor cores for it."""
    shapes: list[dict[str, Any]] = [{**asdict(gemm), **gemm_rates(gemm, case)} for gemm in gemms(case)]
    fp8 = [shape["fp8"] for shape in shapes if shape["fp8"] is not None]
    return {"bf16": max(shape["bf16"] for shape in shapes), "fp8": max(fp8) if fp8 else None, "shapes": shapes}


def gemm_rates(gemm: Gemm, case: Case) -> dict[str, float | None]:
    """Return TFLOP/s of one product in BF16 and in FP8; None where there are no tensor cores for it."""
    a = torch.randn(gemm.m, gemm.k, device=case.device, dtype=torch.bfloat16)
    b = torch.randn(gemm.n, gemm.k, device=case.device, dtype=torch.bfloat16)
    rates: dict[str, float | None] = {"bf16": gemm.tflops(_time(lambda: torch.mm(a, b.t()), case)), "fp8": None}
    if has_fp8_tensor_cores(torch.device(case.device)) and gemm.n % ALIGNMENT == gemm.k % ALIGNMENT == 0:
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device=case.device)

        def multiply() -> Tensor:
            return torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

        rates["fp8"] = gemm.tflops(_time(multiply, case))
    return rates


def _time(function: Callable[[], object], case: Case) -> float:
    return device_time([function] * CALLS, case.device)


def bench_gemms(case: Case) -> dict[str, Any]:
    """Return TFLOP/s of BF16 and of every kind of FP8 product through `octavo.ops.gemm_nt`, with the ceiling."""
    ceilings = measure_ceilings(case)
    shapes = {(shape["linear"], shape["which"]): shape for shape in ceilings["shapes"]}
    rows = []
    for linear in case.linears:
        for kind, (recipe, fast) in KINDS.items():
            for which, timing in _time_own(linear, case, recipe, fast).items():
                name = f"{linear.name} {which} {kind}"
                rows.append({"name": name, "kind": kind, **shapes[linear.name, which], **timing})
    return {"kind": "gemm", "ceilings": {name: ceilings[name] for name in ("bf16", "fp8")}, "rows": rows}


def _time_own(linear: Linear, case: Case, recipe_name: str, fast: bool) -> dict[str, dict[str, Any]]:
    """Time y, dx and dw."""
    recipe = FP8TrainingConfig.from_recipe(recipe_name).recipe
    m, n, k = case.tokens, linear.n, linear.k

    def both(rows: int, columns: int, operand: OperandRecipe) -> list[Quantized]:
        x = torch.randn(rows, columns, device=case.device, dtype=torch.bfloat16)
        return ops.quantize(x, new_states(device=case.device), operand, record=False, layout="both")

    def multiply(a: Quantized, b: Quantized) -> Tensor:
        return ops.gemm_nt(*a, *b, bias=None, out_dtype=torch.bfloat16, batch=[], fast=fast, emulate=False)

    x, w, g = both(m, k, recipe.x), both(n, k, recipe.w), both(m, n, recipe.g)
    figures = {}
    for which, a, b in (("y", x[0], w[0]), ("dx", g[0], w[1]), ("dw", g[1], x[1])):
        seconds, reason = try_device_time([partial(multiply, a, b)] * CALLS, case.device)
        rate = None if seconds is None else 2 * m * n * k / seconds / 1e12
        figures[which] = {"status": FAILED if seconds is None else TIMED, "reason": reason, "tflops": rate}
    return figures
