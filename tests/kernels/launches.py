"""Every kernel of the library, launched by its host function on CPU tensors: to be compiled, not run.

`launches(dtype, rounding)` gives named calls. Shapes come in whole tiles and with edges; `tests/kernels/compiling.py`
and `tests/golden/ptx.py` replace Triton's launch by a compilation and look at the result. Each branch of each kernel is
there in BF16; in FP32 and rounded at random, what depends on it.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from octavo import FP8TrainingConfig
from octavo.kernels import (
    adamw,
    cross_entropy,
    decode,
    decode_store,
    few_tokens,
    gated,
    norm,
    quantize,
    rotary,
    sampling,
    slots,
    split,
)
from octavo.kernels.adapters import gradients, outputs
from octavo.kernels.gated import blocks, low_rank
from octavo.kernels.gemm import triton as gemm_triton
from octavo.kernels.quantize import by_scales, dequantize, transpose
from octavo.models.bdh.kernels import backward as bdh_backward
from octavo.models.bdh.kernels import forward as bdh
from octavo.models.bdh.kernels import scores as bdh_scores
from octavo.numerics import E4M3, E5M2, Quantized
from octavo.numerics.activation import ACTIVATIONS
from octavo.numerics.adamw import Step, with_levels
from octavo.numerics.norm import Norm
from octavo.numerics.rotary import Heads
from octavo.numerics.scaling import new_states
from tests.kernels.launches_of_decoding import Launch, decode_launches, few_token_launches, sampling_launches

RECIPES = {
    "delayed": FP8TrainingConfig(),
    "current": FP8TrainingConfig.from_recipe("current"),
    "little margin": FP8TrainingConfig(margin=-2),
    "channel": FP8TrainingConfig.from_recipe("channel"),
    "block": FP8TrainingConfig.from_recipe("block"),
    "block, channel wgrad": FP8TrainingConfig.from_recipe("block", wgrad="channel"),
    "mx": FP8TrainingConfig.from_recipe("mx"),
    "mx floor": FP8TrainingConfig.from_recipe("mx", mx_rule="floor", fp8_format="E5M2"),
}


def let_launches_overlap() -> None:
    """Have the kernels that may begin early on a Hopper GPU do so here: on a CPU none would."""
    for module in (quantize, decode, decode_store, few_tokens, sampling, slots):
        module.may_overlap = lambda _device: True  # type: ignore[attr-defined]


def launches(dtype: torch.dtype, rounding: str) -> Iterator[Launch]:
    for part in (_quantize, _gated, _gated_blocks, _bdh):
        yield from part(dtype, rounding)
    if rounding == "nearest":
        decoding = (decode_launches, sampling_launches)
        for part in (_cross_entropy, _adamw, _low_rank, few_token_launches, _norm, _rotary, *decoding):
            yield from part(dtype)
        if dtype == torch.bfloat16:
            yield from _gemm()
            yield from _bytes()


def _is_usual(dtype: torch.dtype, rounding: str) -> bool:
    return dtype == torch.bfloat16 and rounding == "nearest"


def _state() -> Tensor:
    return new_states(device="cpu")


def _quantize(dtype: torch.dtype, rounding: str) -> Iterator[Launch]:
    for name, config in RECIPES.items():
        recipe = config.replace(rounding=rounding, scaling=config.scaling).recipe
        for shape in ((256, 256), (250, 130)) if rounding == "nearest" else ((256, 256),):
            x = torch.zeros(shape, dtype=dtype)
            yield f"quantize {name} g both {shape}", lambda x=x, r=recipe.g: _quantized(x, r, layout="both")
            if "block" in name:
                yield f"quantize {name} w both {shape}", lambda x=x, r=recipe.w: _quantized(x, r, layout="both")
        x = torch.zeros(256, 256, dtype=dtype)
        for layout in ("rows", "columns") if _is_usual(dtype, rounding) else ():
            yield f"quantize {name} x {layout}", lambda x=x, r=recipe.x, y=layout: _quantized(x, r, layout=y)
            yield (
                f"quantize {name} w {layout} unrecorded",
                lambda x=x, r=recipe.w, y=layout: _quantized(x, r, layout=y, record=False),
            )
    recipe = RECIPES["delayed"].replace(rounding=rounding).recipe
    x = torch.zeros(256, 256, dtype=dtype)
    if rounding == "nearest":
        yield from _by_scales(dtype)
    yield (
        "quantize given scale",
        lambda: quantize.quantize_group([x], _state(), recipe.x, layout="both", scale=torch.ones(())),
    )
    channel = RECIPES["channel"].replace(rounding=rounding).recipe
    for r in (recipe, channel):
        yield f"quantize group {r}", lambda r=r: quantize.quantize_group([x, x], _state(), r.w, layout="both")
    yield "quantize batch", lambda: _quantized(x.view(4, 64, 256), channel.x, layout="both")
    for width in (256, 300, 6144, 14336) if rounding == "nearest" else (256,):
        wide = torch.zeros(16, width, dtype=dtype)
        yield f"quantize rows of {width}", lambda x=wide: _quantized(x, channel.x)
        yield (
            f"quantize folded rows of {width}",
            lambda x=wide: quantize.quantize_folded(x, torch.ones(x.shape[1]), _state(), channel.g),
        )


def _by_scales(dtype: torch.dtype) -> Iterator[Launch]:
    """Rows of a larger matrix by its scales, and maxima alone: what shards of weights need."""
    groups = {"block": (128, 128), "columns": (None, 1), "mx": (32, 1)}
    for (name, (height, width)), shape in itertools.product(groups.items(), ((256, 256), (250, 130))):
        counts = 1 if height is None else 9, -(-shape[1] // width)
        scale = torch.ones(counts, dtype=torch.uint8 if name == "mx" else torch.float32)
        x, how = torch.zeros(shape, dtype=dtype), {"first": 16, "height": height, "width": width}
        yield (
            f"quantize by scales {name} {shape}",
            lambda x=x, scale=scale, how=how: by_scales.quantize_by_groups(x, scale, E4M3, **how),
        )
    x = torch.zeros(256, 256, dtype=dtype)
    for by_column in (False, True):
        yield f"amax by_column={by_column}", lambda c=by_column: quantize.matrix_amax(x, by_column=c)


def _quantized(x: Tensor, recipe, **how) -> object:
    return quantize.quantize_group([x], _state(), recipe, **how)


def _gated(dtype: torch.dtype, rounding: str) -> Iterator[Launch]:
    for activation in ACTIVATIONS if _is_usual(dtype, rounding) else ("silu",):
        for m, f in ((256, 256), (257, 300)) if rounding == "nearest" and activation == "silu" else ((256, 256),):
            gate_up, dh = torch.zeros(m, 2 * f, dtype=dtype), torch.zeros(m, f, dtype=dtype)
            name = f"{activation} {(m, f)}"
            if rounding == "nearest":
                yield f"gated {name}", lambda gate_up=gate_up, a=activation: gated.gated(gate_up, a)
                yield (
                    f"gated backward {name}",
                    lambda dh=dh, gate_up=gate_up, a=activation: gated.gated_backward(dh, gate_up, a),
                )
            for scaling in ("delayed", "current"):
                recipe = RECIPES[scaling].replace(rounding=rounding, scaling=scaling).recipe
                yield (
                    f"gated quantize {scaling} {name}",
                    lambda gate_up=gate_up, a=activation, r=recipe: gated.gated_quantize(
                        gate_up, _state(), r.x, a, record=True
                    ),
                )
                yield (
                    f"gated quantize backward {scaling} {name}",
                    lambda dh=dh, gate_up=gate_up, a=activation, r=recipe: gated.gated_quantize_backward(
                        dh, gate_up, torch.ones(()), _state(), r.g, r.x, a
                    ),
                )
        recipe = RECIPES["delayed"].replace(rounding=rounding).recipe
        gate_up, dh, saved = torch.zeros(256, 512, dtype=dtype), torch.zeros(256, 256, dtype=dtype), _saved()
        yield (
            f"gated quantize and save {activation}",
            lambda gate_up=gate_up, a=activation, r=recipe, saved=saved: gated.gated_quantize(
                gate_up, _state(), r.x, a, record=True, into=saved
            ),
        )
        yield (
            f"gated quantize backward from saved {activation}",
            lambda dh=dh, a=activation, r=recipe, saved=saved: gated.gated_quantize_backward(
                dh, saved.data, torch.ones(()), _state(), r.g, r.x, a, saved_scale=saved.scale
            ),
        )


def _gated_blocks(dtype: torch.dtype, rounding: str) -> Iterator[Launch]:
    for recipe_name in ("block", "block, channel wgrad", "mx", "mx floor"):
        recipe = RECIPES[recipe_name].replace(rounding=rounding).recipe
        for activation in ACTIVATIONS if _is_usual(dtype, rounding) else ("silu",):
            for m in (256, 250) if _is_usual(dtype, rounding) and activation == "silu" else (256,):
                gate_up, dh = torch.zeros(m, 512, dtype=dtype), torch.zeros(m, 256, dtype=dtype)
                name = f"{recipe_name} {activation} {m}"
                yield (
                    f"gated blocks {name}",
                    lambda gate_up=gate_up, r=recipe, a=activation: blocks.gated_quantize(
                        gate_up, _state(), r.x, a, record=True
                    ),
                )
                yield (
                    f"gated blocks backward {name}",
                    lambda dh=dh, gate_up=gate_up, r=recipe, a=activation: blocks.gated_quantize_backward(
                        dh, gate_up, _state(), r.g, r.x, a
                    ),
                )


def _saved() -> Quantized:
    return Quantized(torch.zeros(256, 512, dtype=E4M3.dtype), torch.ones(256, 4, dtype=torch.uint8))


def _bdh(dtype: torch.dtype, rounding: str) -> Iterator[Launch]:
    for scaling in ("delayed", "current") if _is_usual(dtype, rounding) else ("delayed",):
        recipe = RECIPES[scaling].replace(rounding=rounding, scaling=scaling).recipe
        for t, n in ((128, 256), (17, 34)) if _is_usual(dtype, rounding) and scaling == "delayed" else ((128, 256),):
            s_pre, t_pre = torch.zeros(1, t, 2, n, dtype=dtype), torch.zeros(2, 1, t, n, dtype=dtype)
            angles = torch.zeros(t, n // 2)
            saved = Quantized(torch.zeros(1, t, 2, n, dtype=E4M3.dtype), torch.ones(()))
            scores = torch.zeros(1, 2, t, t, dtype=dtype)
            name = f"{scaling} {(t, n)}"
            yield (
                f"bdh relu_rope {name}",
                lambda x=s_pre, y=angles, r=recipe: bdh.relu_rope(x, y, y, _state(), _state(), r.x),
            )
            yield (
                f"bdh rope_columns {name}",
                lambda s=saved, y=angles, r=recipe: bdh.rope_columns(s, y, y, torch.ones(()), r.x, dtype),
            )
            yield (
                f"bdh gate {name}",
                lambda x=s_pre, y=t_pre, r=recipe: bdh.gate(x, y, _state(), _state(), r.x),
            )
            yield (
                f"bdh gate_backward {name}",
                lambda x=s_pre, s=saved, r=recipe: bdh_backward.gate_backward(
                    x, s, s, torch.ones(()), _state(), r.g, r.x
                ),
            )
            yield (
                f"bdh relu_rope_backward {name}",
                lambda x=s_pre, s=saved, y=angles, r=recipe: bdh_backward.relu_rope_backward(
                    x.transpose(1, 2), x, s.data, s, y, y, _state(), r.g
                ),
            )
            yield (
                f"bdh causal {name}",
                lambda x=scores, r=recipe: bdh_scores.mask(x, _state(), r.x, symmetric=False),
            )
            yield f"bdh symmetric {name}", lambda x=scores, r=recipe: bdh_scores.mask(x, _state(), r.g, symmetric=True)


def _cross_entropy(dtype: torch.dtype) -> Iterator[Launch]:
    logits, labels, lse = torch.zeros(256, 512, dtype=dtype), torch.zeros(256, dtype=torch.int64), torch.zeros(256)
    one, columns = torch.ones(()), torch.zeros(512, 256).to(E5M2.dtype)
    yield "cross entropy", lambda: cross_entropy.cross_entropy(logits, labels)
    yield "cross entropy backward", lambda: cross_entropy.cross_entropy_backward_(logits, labels, lse, one)
    for which in (None, columns):
        yield (
            f"cross entropy quantize {'rows' if which is None else 'both'}",
            lambda c=which: cross_entropy.cross_entropy_quantize(logits, labels, lse, one, E5M2, c),
        )
    yield "cross entropy scale", lambda: cross_entropy.scale_(logits, one)


def _adamw(dtype: torch.dtype) -> Iterator[Launch]:
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    def step(stochastic: bool) -> Step:
        return Step(1, 1e-3, (0.9, 0.95), 1e-8, 0.0, stochastic)

    for rows in (64, 65):
        p = torch.zeros(rows, 256, dtype=dtype)
        means = {
            "4 bits": [with_levels(OptimState4bit.zeros(p.shape, signed, 128)) for signed in (True, False)],
            "8 bits": [OptimState8bit.zeros(p.shape, signed, 256) for signed in (True, False)],
            "FP8": [OptimStateFp8.zeros(p.shape, 256) for _ in range(2)],
            "plain": [torch.zeros_like(p), torch.zeros_like(p)],
        }
        for name, pair in means.items():
            for stochastic in (True, False) if dtype == torch.bfloat16 and rows == 64 else (False,):
                rounded = "at random" if stochastic else "nearest"
                yield (
                    f"adamw {name} {rows} {rounded}",
                    lambda p=p, pair=pair, s=stochastic: adamw.apply(step(s), p, p, *pair),
                )
            if dtype == torch.bfloat16:
                low = torch.zeros(p.shape, dtype=torch.int16)
                yield (
                    f"adamw {name} {rows} split",
                    lambda p=p, pair=pair, low=low: adamw.apply(step(False), p, p.float(), *pair, low),
                )


def _norm(dtype: torch.dtype) -> Iterator[Launch]:
    for k in (4096, 3072, 96) if dtype == torch.bfloat16 else (4096,):
        h, inverse = torch.zeros(33, k, dtype=dtype), torch.ones(33, 1)
        for shifted in (False, True):
            plain = Norm(torch.zeros(k, dtype=dtype), 1e-5, shifted)
            name = f"of {k}{' shifted' if shifted else ''}"
            yield f"norm {name}", lambda h=h, n=plain: norm.rms_norm(h, n)
            yield f"norm {name} of a sum", lambda h=h, n=plain: norm.add_rms_norm(h, h, n)
            yield (
                f"norm backward {name}",
                lambda h=h, n=plain, i=inverse: norm.norm_gradients(h, Quantized(h, i), n, i, h, needs=(True, True)),
            )
        for scale in ((), (33, 1), (33, -(-k // 128))):
            saved = Quantized(torch.zeros(33, k, dtype=E4M3.dtype), torch.ones(scale))
            for needs in ((True, True), (True, False)):
                yield (
                    f"norm backward {k} from FP8 by {scale}{' and of its weight' if needs[1] else ''}",
                    lambda h=h, s=saved, i=inverse, needs=needs: norm.norm_gradients(
                        h, s, Norm(h[0], 1e-5), i, None, needs=needs
                    ),
                )


def _rotary(dtype: torch.dtype) -> Iterator[Launch]:
    for heads in (Heads(4, 2, 128), Heads(3, 1, 80)) if dtype == torch.bfloat16 else (Heads(4, 2, 128),):
        qkv, cos = torch.zeros(66, heads.features, dtype=dtype), torch.zeros(33, heads.width, dtype=dtype)
        gradients = [torch.zeros(66, count, heads.width, dtype=dtype) for count in (heads.q, heads.kv, heads.kv)]
        plain, shifted = (Norm(torch.zeros(heads.width, dtype=dtype), 1e-5, flag) for flag in (False, True))
        for norms in (None, (plain, plain), (shifted, shifted)):
            normed = "" if norms is None else " shifted norms" if norms[0].shifted else " norms"
            name = f"{heads.width}{normed}"
            yield (
                f"rotary {name}",
                lambda qkv=qkv, cos=cos, heads=heads, norms=norms: rotary.rotary(qkv, cos, cos, heads, norms),
            )
            yield (
                f"rotary backward {name}",
                lambda qkv=qkv, cos=cos, heads=heads, norms=norms, g=gradients: rotary.rotary_backward(
                    *g, qkv if norms else None, cos, cos, heads, norms
                ),
            )


def _low_rank(dtype: torch.dtype) -> Iterator[Launch]:
    """What is for 16 bits only: adapters, and the gated activation with theirs."""
    if dtype == torch.float32:
        return
    for activation in ACTIVATIONS:
        for m in (256, 250) if activation == "silu" else (256,):
            gate_up, dh = torch.zeros(m, 512, dtype=dtype), torch.zeros(m, 256, dtype=dtype)
            saved = Quantized(torch.zeros(m, 512, dtype=E4M3.dtype), torch.ones(m, 4, dtype=torch.uint8))
            low = low_rank.Low(torch.zeros(m, 32, dtype=dtype), torch.zeros(256, 32, dtype=dtype))
            by_row = low._replace(right=low.right.t())
            name = f"{activation} {m}"
            for into in (saved, None):
                yield (
                    f"gated low rank {name}{' saved' if into else ''}",
                    lambda x=gate_up, low=low, a=activation, into=into: low_rank.gated(x, low, low, a, into),
                )
                yield (
                    f"gated low rank backward {name}{' with h' if into else ''}",
                    lambda dh=dh, saved=saved, low=by_row, a=activation, h=into is not None: low_rank.gated_backward(
                        dh, saved, low, a, factor=torch.ones(512), h=h
                    ),
                )
            yield (
                f"gated low rank {name} without adapters",
                lambda x=gate_up, saved=saved, a=activation: low_rank.gated(x, None, None, a, saved),
            )
    rows = Quantized(torch.zeros(256, 512, dtype=E4M3.dtype), torch.ones(256, 1))
    for rank in (32, 96):
        yield (
            f"adapters down {rank}",
            lambda rank=rank: gradients.add_down(torch.zeros(256, rank), rows, torch.zeros(rank, 512), dtype),
        )
    ups, spans = [torch.zeros(256, 32, dtype=dtype)] * 2, [(0, 256, 1.0), (256, 256, 2.0)]
    y, t = torch.zeros(256, 512, dtype=dtype), torch.zeros(256, 64, dtype=dtype)
    for factor in (torch.ones(512), None):
        for d in (torch.zeros(512 * 32), None):
            yield (
                f"adapters gradients {'folded' if factor is not None else ''} {'dB' if d is not None else ''}",
                lambda factor=factor, d=d: gradients.add_gradients(y, t, ups, spans, factor, t.float(), d),
            )
    yield "adapters add up", lambda: outputs.add_outputs(y, t, ups, spans, None, transposed=True)
    down, up = [torch.zeros(64, 512, dtype=dtype)], [torch.zeros(512, 64, dtype=dtype)]
    one = [(0, 512, 1.0)]
    yield "adapters add down", lambda: outputs.add_outputs(y, t, down, one, None, transposed=False)
    yield "adapters add residual", lambda: outputs.add_outputs(y, t, up, one, y, transposed=True)
    yield (
        "adapters add edges",
        lambda: outputs.add_outputs(y[:250], t[:250], up, one, None, transposed=True),
    )


def _gemm() -> Iterator[Launch]:
    def operand(rows: int, k: int, kind: str, format: torch.dtype = E4M3.dtype, batch: tuple[int, ...] = ()):
        scales = {
            "tensor": torch.ones(()),
            "row": torch.ones(*batch, rows, 1),
            "1x128": torch.ones(*batch, rows, -(-k // 128)),
            "128x128": torch.ones(*batch, -(-rows // 128), -(-k // 128)),
            "mx": torch.ones(*batch, rows, k // 32),
        }
        return Quantized(torch.zeros(*batch, rows, k, dtype=format), scales[kind])

    pairs = [("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128"), ("mx", "mx")]
    for kinds in pairs:
        for m, n in ((256, 256), (130, 272), (48, 48)):
            for fast in (True, False) if kinds == ("tensor", "tensor") else (False,):
                a, b = operand(m, 256, kinds[0]), operand(n, 256, kinds[1], E5M2.dtype)
                yield (
                    f"gemm {kinds} {(m, n)}{' fast' if fast else ''}",
                    lambda a=a, b=b, fast=fast: gemm_triton.gemm_nt(
                        a, b, bias=None, out_dtype=torch.bfloat16, batch=(), fast=fast
                    ),
                )
        a, b = (operand(256, 256, kind, batch=(2, 3)) for kind in kinds)
        bias = torch.zeros(256)
        yield (
            f"gemm {kinds} summed with bias",
            lambda a=a, b=b, bias=bias: gemm_triton.gemm_nt(
                a, b, bias=bias, out_dtype=torch.float32, batch=(3,), fast=True
            ),
        )


def _bytes() -> Iterator[Launch]:
    """Kernels whose input is FP8, or has one dtype only."""
    for shape in ((256, 256), (130, 66)):
        data = torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
        yield f"transpose {shape}", lambda data=data: transpose.transpose(data)
        across = -(-shape[1] // 128)
        for scale in ((), (shape[0], 1), (shape[0], across), (-(-shape[0] // 128), across)):
            for dtype in (torch.bfloat16, torch.float16, torch.float32) if shape == (256, 256) else (torch.bfloat16,):
                yield (
                    f"dequantize {shape} by {scale} to {dtype}",
                    lambda data=data, scale=scale, dtype=dtype: dequantize.dequantize(
                        Quantized(data, torch.ones(scale)), dtype
                    ),
                )
    high, low = torch.zeros(5000, dtype=torch.int16), torch.zeros(5000, dtype=torch.int16)
    yield "join", lambda: split.join(high, low)
    yield "split", lambda: split.split(torch.zeros(5000), high, low)
