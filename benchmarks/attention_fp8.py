"""Does attention in FP8 pay? A flash attention forward in FP8, written here, against cuDNN's BF16 on the same GPU.

    python benchmarks/attention_fp8.py --out attention.json

The forward is the easy half: q · kᵀ contracts over the head's width, along which both lie in memory, and v is handed
over transposed, so that both products have the operands that Hopper's FP8 tensor cores take. Backward has five products
and would need q, k, dO and the score matrices in both layouts. What is measured: the time of forward and of cuDNN's
backward, the error of both against FP64, and what the plain form (two FP8 products with the scores in memory) takes.
"""

import argparse
import datetime
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo import FP8TrainingConfig, fp8_autocast
from octavo.nn.autocast_functions import FUNCTIONS

SHAPES = {"8b": (4, 32, 8, 2048, 128), "1b": (4, 32, 8, 2048, 64)}  # B, heads, groups, T, width
P_MAX = tl.constexpr(448.0)


@triton.jit
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    qk_scale_ptr,
    v_scale_ptr,
    T,
    H,
    GROUP,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Causal attention of q[B·H, T, D], k[B·G, T, D], v[B·G, D, T] in FP8. `qk_scale` includes 1/√D and log2 e."""
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest first
    bh = tl.program_id(1).to(tl.int64)
    bg = (bh // H) * (H // GROUP) + bh % H // GROUP
    qk_scale, v_scale = tl.load(qk_scale_ptr), tl.load(v_scale_ptr)
    t, n, d = m0 + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    q = tl.load(q_ptr + (bh * T + t[:, None]) * D + d[None, :])
    k_ptrs = k_ptr + (bg * T + n[:, None]) * D + d[None, :]
    v_ptrs = v_ptr + (bg * D + d[:, None]) * T + n[None, :]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, D], tl.float32)
    for n0 in tl.range(0, m0 + BLOCK_M, BLOCK_N):
        scores = tl.dot(q, tl.trans(tl.load(k_ptrs + n0 * D))) * qk_scale
        if n0 + BLOCK_N > m0:
            scores = tl.where(t[:, None] >= n0 + n[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        p = tl.exp2(scores - higher[:, None])
        rescale = tl.exp2(top - higher)
        total = total * rescale + tl.sum(p, axis=1)
        p8 = (p * P_MAX).to(v_ptr.dtype.element_ty)
        sums = tl.dot(p8, tl.trans(tl.load(v_ptrs + n0)), sums * rescale[:, None])
        top = higher
    out = sums * (v_scale / P_MAX) / total[:, None]
    tl.store(o_ptr + (bh * T + t[:, None]) * D + d[None, :], out.to(o_ptr.dtype.element_ty))


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().max() / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def fp8_forward(
    q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor], tile: tuple[int, int, int, int]
) -> Tensor:
    """Run the kernel on q and k as they are, and v transposed."""
    b, h, t, d = q.shape
    block_m, block_n, warps, stages = tile
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    _forward_kernel[(t // block_m, b * h)](
        q, k, v, out, *scales, t, h, h // k.shape[1], D=d, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return out


def milliseconds(function: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repeats // 2]


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return ((actual.double() - exact).norm() / exact.norm()).item()


def measure(name: str) -> dict[str, Any]:
    b, h, g, t, d = SHAPES[name]
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, n, t, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (h, g, g))
    flops = 2 * b * h * t * t * d  # causal: half of two products
    figures: dict[str, Any] = {"shape": SHAPES[name]}

    def attend() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    forward = milliseconds(attend)
    gradient = torch.randn(b, h, t, d, device="cuda", dtype=torch.bfloat16)
    both = milliseconds(lambda: attend().backward(gradient))
    doubles = [x[:1].double().repeat_interleave(h // x.shape[1], 1) for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*doubles, is_causal=True)
    figures["bf16"] = {
        "forward_ms": forward,
        "backward_ms": both - forward,
        "forward_tflops": flops / forward / 1e9,
        "error": relative_error(attend()[:1], exact),
    }

    with torch.no_grad():
        (q8, qs), (k8, ks) = quantized(q), quantized(k)
        v8, vs = quantized(v.mT.contiguous())
        scales = (qs * ks / math.sqrt(d) / math.log(2), vs)
        timed = {}
        for tile in ((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 3)):
            try:
                timed[tile] = milliseconds(lambda tile=tile: fp8_forward(q8, k8, v8, scales, tile))
            except triton.runtime.errors.OutOfResources as error:  # a tile that does not fit
                print(f"{tile}: {error}")
        best = min(timed, key=timed.__getitem__)
        figures["fp8"] = {
            "forward_ms": timed[best],
            "forward_tflops": flops / timed[best] / 1e9,
            "tile": best,
            "error": relative_error(fp8_forward(q8, k8, v8, scales, best)[:1], exact),
            "quantising": "not counted",
        }

    context = fp8_autocast(FP8TrainingConfig())
    attention = FUNCTIONS[torch.nn.functional.scaled_dot_product_attention]

    def plain() -> None:
        with context:  # which would refuse `fp8_dpa=True` here, because of what this measures
            out = attention(context.multiply, q, k, v, is_causal=True, enable_gqa=True)
        assert isinstance(out, Tensor), out
        out.backward(gradient)

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    figures["fp8, two products"] = {"forward_and_backward_ms": milliseconds(plain, repeats=5)}
    figures["fp8, two products"]["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device here")
    result = {
        "date": str(datetime.date.today()),
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "shapes": {name: measure(name) for name in SHAPES},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
