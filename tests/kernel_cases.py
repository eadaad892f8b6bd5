"""What tests/kernels and tests/gpu compare kernels by: every recipe, unusual values, equality with the specification.

A kernel and its specification share name and signature, so one comparison serves both places.
"""

import math

import torch
from torch import Tensor

from octavo.numerics import FP8TrainingConfig, OperandRecipe, Quantized
from octavo.numerics.activation import gated, gated_backward
from octavo.numerics.operand import quantize_operand
from octavo.numerics.scaling import SCALE, SLOTS, USED

INTERPRETED = not torch.cuda.is_available()
CONFIGS = {
    "delayed": FP8TrainingConfig(),
    "current": FP8TrainingConfig.from_recipe("current", margin=1),
    "channel": FP8TrainingConfig.from_recipe("channel"),
    "block": FP8TrainingConfig.from_recipe("block"),
    "block, channel wgrad": FP8TrainingConfig.from_recipe("block", wgrad="channel"),
    "mx": FP8TrainingConfig.from_recipe("mx"),
    "mx floor": FP8TrainingConfig.from_recipe("mx", mx_rule="floor"),
    "E5M2": FP8TrainingConfig(fp8_format="E5M2"),
    "mx E5M2 floor": FP8TrainingConfig(granularity="mx", mx_rule="floor", fp8_format="E5M2"),
    "little margin": FP8TrainingConfig.from_recipe("channel", margin=-2),  # saturates
}


def operands() -> dict[str, OperandRecipe]:
    """Every operand's recipe, each once."""
    actual: dict[OperandRecipe, str] = {}
    for name, config in CONFIGS.items():
        for operand in ("x", "w", "g"):
            actual.setdefault(getattr(config.recipe, operand), f"{name} {operand}")
    return {name: recipe for recipe, name in actual.items()}


def sample(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Rows and columns of very different size, with zeros in between."""
    x = torch.randn(shape, device=device) * torch.exp(3 * torch.randn(*shape[:-1], 1, device=device))
    x = x * torch.exp(2 * torch.randn(*shape[:-2], 1, shape[-1], device=device))
    return torch.where(torch.rand(shape, device=device) < 0.05, 0.0, x).to(dtype)


def unusual(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Tensor]:
    """Matrices that hide surprises."""
    holes = sample(*shape, dtype=dtype, device=device)
    holes.view(-1)[3], holes.view(-1)[-1] = math.nan, math.nan
    infinite = sample(*shape, dtype=dtype, device=device)
    infinite.view(-1)[5], infinite.view(-1)[-2] = math.inf, -math.inf
    tiny = sample(*shape, dtype=dtype, device=device).clamp(-1e4, 1e4) * 2.0**-126
    if INTERPRETED and dtype == torch.bfloat16:  # whose subnormal numbers Triton's interpreter misreads
        tiny = torch.where(tiny.abs() < 2.0**-126, 0.0, tiny)
    largest = torch.finfo(dtype).max
    return {
        "zeros": torch.zeros(shape, dtype=dtype, device=device),
        "NaN": holes,
        "infinity": infinite,
        "all NaN": torch.full(shape, math.nan, dtype=dtype, device=device),
        "tiny": tiny,
        "huge": (torch.rand(shape, device=device) * 2 - 1).mul(largest).to(dtype),
        "ties": (torch.randint(-64, 65, shape, device=device) / 64).to(dtype),
    }


def with_nan(m: int, f: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """gate_up and dh in BF16 with one NaN in gate, one in up and one in dh, each in a row of its own."""
    gate_up, dh = (sample(m, n, device=device).clamp(-30, 30).to(torch.bfloat16) for n in (2 * f, f))
    gate_up[1, 7], gate_up[20, f + 9], dh[m - 1, 11] = math.nan, math.nan, math.nan
    return gate_up, dh


def assert_nan_alike(actual: Tensor, expected: Tensor) -> None:
    nan = expected.float().isnan()
    assert nan.any() and torch.equal(actual.float().isnan(), nan)


def new_state(scale: float = 0.0, device: str = "cpu") -> Tensor:
    state = torch.zeros(SLOTS, device=device)
    state[SCALE] = scale
    return state


def codes(data: Tensor) -> Tensor:
    """The bytes, with one pattern for all NaN."""
    return torch.where(data.float().isnan(), 0x7F, data.view(torch.uint8))


def scale_bits(scale: Tensor) -> Tensor:
    return scale.contiguous().view(torch.uint8 if scale.element_size() == 1 else torch.int32)


def assert_same_bits(actual: list[Quantized], expected: list[Quantized]) -> None:
    assert len(actual) == len(expected)
    for mine, spec in zip(actual, expected, strict=True):
        assert mine.data.shape == spec.data.shape and mine.data.dtype == spec.data.dtype and mine.data.is_contiguous()
        assert mine.scale.shape == spec.scale.shape
        assert torch.equal(scale_bits(mine.scale), scale_bits(spec.scale)), "scales"
        wrong = codes(mine.data) != codes(spec.data)
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, first at {wrong.nonzero()[0].tolist()}"


def assert_same_state(actual: Tensor, expected: Tensor, atol: float = 1e-7) -> None:
    actual, expected = actual.clone(), expected.clone()
    actual[USED] = expected[USED] = 0.0  # from a kernel's first pass to its second
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=atol)


def assert_nearly_same(actual: Quantized, expected: Quantized, share: float = 1e-3) -> None:
    """Scales within a few units, at most `share` of the values (or one) off, and by one FP8 step only."""
    assert actual.data.shape == expected.data.shape and actual.data.is_contiguous()
    torch.testing.assert_close(actual.scale, expected.scale, rtol=1e-5, atol=0)
    steps = (_ordered(actual.data) - _ordered(expected.data)).abs()
    assert steps.max() <= 1, f"off by {steps.max()} steps"
    assert (steps > 0).sum() <= max(share * steps.numel(), 1), f"{int((steps > 0).sum())} of {steps.numel()} differ"


def _ordered(data: Tensor) -> Tensor:
    """Codes as integers in the order of their values; all NaN above everything."""
    bits = codes(data).to(torch.int32)
    return torch.where(bits >= 128, -(bits - 128), bits)


def assert_on_neighbours(q: Quantized, x: Tensor, slack: float = 0.0) -> None:
    """Stochastic rounding goes to one of the two FP8 values around `x / scale`, and stays where it fits exactly.

    `slack`: how far, relative to it, the kernel's own `x` may be from this one.
    """
    values = torch.arange(256, dtype=torch.uint8, device=x.device).view(q.data.dtype).float()
    values = values[values.isfinite()].unique()
    v = x.float() * (1 / q.scale)
    upper = torch.searchsorted(values, v + slack * v.abs()).clamp(max=len(values) - 1)
    lower = (torch.searchsorted(values, v - slack * v.abs(), right=True) - 1).clamp(min=0)
    actual = q.data.float()
    assert ((actual <= values[upper]) & (actual >= values[lower])).all()


def gated_spec(gate_up: Tensor, state: Tensor, recipe: OperandRecipe, activation: str, *, record: bool) -> Quantized:
    return quantize_operand(gated(gate_up, activation), state, recipe, record=record)[0]


def gated_backward_spec(
    dh: Tensor,
    gate_up: Tensor,
    h_scale: Tensor,
    state: Tensor,
    recipe: OperandRecipe,
    recipe_h: OperandRecipe,
    activation: str,
) -> tuple[Quantized, Quantized, Quantized]:
    rows, columns = quantize_operand(gated_backward(dh, gate_up, activation), state, recipe, layout="both")
    h = quantize_operand(gated(gate_up, activation), state, recipe_h, layout="columns", scale=h_scale)[0]
    return rows, columns, h


def low_rank(m: int, f: int, rank: int, scaling: float, *, transposed: bool = True, device: str = "cpu") -> tuple:
    """Left, right and factor of a product to add; left is part of something wider, as the adapters' products are."""
    left = torch.randn(m, rank + 3, device=device)[:, 3:].to(torch.bfloat16)
    return left, torch.randn((f, rank) if transposed else (rank, f), device=device).to(torch.bfloat16), scaling


def with_low_rank(x: Tensor, product: tuple | None, *, transposed: bool = True) -> Tensor:
    if product is None:
        return x
    left, right, scaling = product
    right = right.float().t() if transposed else right.float()
    return (x.float() + scaling * (left.float() @ right)).to(x.dtype)


def adapter_gradients(g, t, ups, spans, factor):
    """u and all dB one after the other, in FP32: what `kernels.adapters.gradients` adds up."""
    g = g.float() if factor is None else g.float() / factor
    parts = [scaling * g[:, first : first + size] for first, size, scaling in spans]
    u = torch.cat([part @ up.float() for part, up in zip(parts, ups, strict=True)], dim=1)
    ts = t.float().split([up.shape[1] for up in ups], dim=1)
    return u, torch.cat([(part.T @ own).flatten() for part, own in zip(parts, ts, strict=True)])
