"""Does FP8 pay for this linear? A small cost model.

A linear with M tokens, K inputs and N outputs multiplies 2MKN three times: forward and both gradients. FP8 doubles the
rate and pays for quantising in bytes: x and g are read once and written in two layouts, w is read twice and written
twice. Each kernel also takes a few microseconds whatever its size, and FP8 has eight more of them. So FP8 pays where
the GEMM is large in all three dimensions. Rates and limits are those of an architecture (`kernels/tuning.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.kernels.tuning import Rates, Tuning


@dataclass(frozen=True)
class Estimate:
    """Seconds for one linear, forward and backward."""

    bf16: float
    fp8: float

    @property
    def pays(self) -> bool:
        return self.fp8 < self.bf16

    def __str__(self) -> str:
        return f"about {self.fp8 * 1e6:.0f} µs in FP8 against {self.bf16 * 1e6:.0f} in BF16"


def estimate(tokens: int, inputs: int, outputs: int, rates: Rates) -> Estimate:
    """Estimate the time of the linear in BF16 and in FP8."""
    flops = 2.0 * tokens * inputs * outputs

    def products(rate: float) -> float:
        return 3 * (flops / rate + rates.start_of_gemm)

    moved = 4 * tokens * (inputs + outputs) + 6 * inputs * outputs
    return Estimate(products(rates.bf16_flops), products(rates.fp8_flops) + moved / rates.bytes + 8 * rates.launch)


def why_not(tokens: int, inputs: int, outputs: int, tuning: Tuning) -> str:
    """Why a linear should stay in BF16 at this many tokens a step; empty if FP8 pays."""
    estimated = estimate(tokens, inputs, outputs, tuning.rates)
    return "" if estimated.pays else f"FP8 does not pay at {tokens} tokens: {estimated}"


def why_not_frozen(shapes: Iterable[tuple[int, float, int]], tuning: Tuning) -> str:
    """Why products by weights frozen in FP8 should be in BF16; empty if FP8 pays.

    `shapes`: of each linear its inputs, the share of quantising them that is its own, and its outputs. What FP8 saves
    goes with inputs × outputs, what it costs with inputs + outputs, of which x and g are quantised; both with the
    tokens. So the mean width decides, the first over the second: timed (`benchmarks/frozen_products.py`, H200,
    2026-11-16, channel and block), BF16 by dequantised weights is 9 and 17 % faster at 419 (SmolLM2 135M), 0 and 8 % at
    698 (360M), as fast at 808 (Qwen3 0.6B), and FP8 16 and 8 % faster at 1,605 (Llama 1B).
    """
    saved = cost = 0.0
    for inputs, share, outputs in shapes:
        saved += inputs * outputs
        cost += inputs * share + outputs
    width = saved / max(cost, 1.0)
    least = tuning.frozen_width
    return "" if width >= least else f"FP8 does not pay at a width of {width:.0f}, but from {least} on"
