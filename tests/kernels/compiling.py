"""Compiles kernels for a Hopper GPU, on a machine without one, and looks at what came out.

Run as a script, in a process of its own: the tests beside it have Triton interpret kernels, this one has it compile
them. Takes dtypes (float32,bfloat16), a rounding, and a folder for the PTX if it is wanted. Prints one JSON object per
kernel, and between dtypes an empty line.
"""

import json
import re
import sys
from pathlib import Path

import torch
import triton

from benchmarks.hopper import compile_for_hopper
from octavo import FP8TrainingConfig
from octavo.kernels import (
    adamw,
    adapter_gradients,
    adapter_outputs,
    cross_entropy,
    dequantize,
    gated,
    gated_lora,
    gated_scaled,
    quantize,
    transpose,
)
from octavo.kernels.tiles import CHANNEL
from octavo.models.bdh.kernels import scores
from octavo.numerics import E4M3, E5M2, Quantized
from octavo.numerics.adamw import Step, with_levels
from octavo.numerics.scaling import new_rows

REGISTER = re.compile(r"%[a-z]+\d+")
WITHOUT_RESULT = ("st.", "red.", "bar.", "bra", "ret", "fence.")


def unwritten(ptx):
    """Registers that are read and never written: what ptxas may do with the others in the same word is anything."""
    read, written = set(), set()
    for statement in re.sub("//.*", "", ptx).replace("\n", ";\n").split(";"):
        found = re.match(r"\s*(?:@!?(%\w+)\s+)?([a-z][\w.:]*)\s+(.*)", statement)
        if found is None:
            continue
        predicate, operation, operands = found.groups()
        result = "" if operation.startswith(WITHOUT_RESULT) else re.match(r"\{[^}]*\}|[^,;]*", operands)[0]
        written.update(REGISTER.findall(result))
        read.update(REGISTER.findall(f"{predicate} {operands[len(result) :]}"))
    return read - written


def waits(ptx):
    """Where a kernel waits for the launch before it: how many loads and stores come first, for each time it does."""
    parts = ptx.split("griddepcontrol.wait")
    return [len(re.findall(r"\b(?:ld|st|red|atom)\.global", "".join(parts[: i + 1]))) for i in range(len(parts) - 1)]


def compile_instead(kernel, *args, grid, warmup, **constants):  # noqa: ARG001
    """In place of `JITFunction.run`."""
    compiled = compile_for_hopper(kernel, args, constants)
    conversions = [line for line in compiled.asm["ttgir"].splitlines() if "ttg.convert_layout" in line]
    found = {
        "kernel": kernel.fn.__name__,
        "bytes_turned": sum("xf8E" in line for line in conversions),
        "conversions": len(conversions),
        "unwritten": sorted(unwritten(compiled.asm["ptx"])),
        "may_wait": constants.get("OVERLAPS", False),
        "waits": waits(compiled.asm["ptx"]),
        "needs_nothing": kernel.fn.__name__ == "columns_kernel" and constants["MODE"] != CHANNEL.value,
    }
    if len(sys.argv) > 3:
        path = Path(sys.argv[3]) / f"{found['kernel']}-{len(list(Path(sys.argv[3]).iterdir()))}"
        path.with_suffix(".ptx").write_text(compiled.asm["ptx"])
    print(json.dumps(found), flush=True)


def main(dtype: torch.dtype, rounding: str) -> None:
    triton.runtime.jit.JITFunction.run = compile_instead
    quantize.may_overlap = lambda _device: True
    for name, granularity in (("delayed", "tensor"), ("current", "channel"), ("current", "block"), ("current", "mx")):
        config = FP8TrainingConfig(scaling=name, granularity=granularity, rounding=rounding)
        for shape in ((256, 256), (250, 130)):
            x = torch.zeros(shape, dtype=dtype)
            quantize.quantize_operand(x, new_rows(device="cpu"), config.recipe.g, layout="both")
            if granularity == "block":
                quantize.quantize_operand(x, new_rows(device="cpu"), config.recipe.w, layout="both")
    recipe = FP8TrainingConfig(rounding=rounding).recipe
    for m, f in ((256, 256), (257, 300)):
        gate_up, dh = torch.zeros(m, 2 * f, dtype=dtype), torch.zeros(m, f, dtype=dtype)
        gated.gated_quantize_backward(dh, gate_up, torch.ones(()), new_rows(device="cpu"), recipe.g, recipe.x, "silu")
    kept = Quantized(torch.zeros(256, 512, dtype=E4M3.dtype), torch.ones(256, 4, dtype=torch.uint8))
    gate_up, dh = torch.zeros(256, 512, dtype=dtype), torch.zeros(256, 256, dtype=dtype)
    gated.gated_quantize(gate_up, new_rows(device="cpu"), recipe.x, "silu", record=True, into=kept)
    gated.gated_quantize_backward(
        dh, kept.data, torch.ones(()), new_rows(device="cpu"), recipe.g, recipe.x, "silu", kept_scale=kept.scale
    )
    for name, how in (("block", {}), ("block", {"wgrad": "channel"}), ("mx", {})):
        recipe_b = FP8TrainingConfig.from_recipe(name, rounding=rounding, **how).recipe
        gate_up, dh = torch.zeros(256, 512, dtype=dtype), torch.zeros(256, 256, dtype=dtype)
        quantize.quantize_operand(dh, new_rows(device="cpu"), recipe_b.g, layout="both")
        gated_scaled.gated_quantize(gate_up, new_rows(device="cpu"), recipe_b.x, "silu", record=True)
        gated_scaled.gated_quantize_backward(dh, gate_up, new_rows(device="cpu"), recipe_b.g, recipe_b.x, "silu")
    logits, labels, lse = torch.zeros(256, 512, dtype=dtype), torch.zeros(256, dtype=torch.int64), torch.zeros(256)
    cross_entropy.cross_entropy_quantize(
        logits, labels, lse, torch.ones(()), E5M2, torch.zeros(512, 256).to(E5M2.dtype)
    )
    if dtype != torch.float32:
        low = gated_lora.Low(torch.zeros(256, 32, dtype=dtype), torch.zeros(256, 32, dtype=dtype))
        kept = Quantized(torch.zeros(256, 512, dtype=E4M3.dtype), torch.ones(256, 4, dtype=torch.uint8))
        gated_lora.gated(torch.zeros(256, 512, dtype=dtype), low, low, "silu", kept)
        low = low._replace(right=low.right.t())
        dh = torch.zeros(256, 256, dtype=dtype)
        gated_lora.gated_backward(dh, kept, low, "silu", factor=torch.ones(512), h=True)
        rows = Quantized(kept.data, torch.ones(256, 1))
        dequantize.dequantize(rows, dtype)
        for rank in (32, 96):
            adapter_gradients.add_down(torch.zeros(256, rank), rows, torch.zeros(rank, 512), dtype)
        ups, places = [torch.zeros(256, 32, dtype=dtype)] * 2, [(0, 256, 1.0), (256, 256, 2.0)]
        y, t = torch.zeros(256, 512, dtype=dtype), torch.zeros(256, 64, dtype=dtype)
        adapter_gradients.add_gradients(y, t, ups, places, torch.ones(512), t.float(), torch.zeros(512 * 32))
        adapter_outputs.add_outputs(y, t, ups, places, None, turned=True)
        adapter_outputs.add_outputs(y, t, [torch.zeros(64, 512, dtype=dtype)], [(0, 512, 1.0)], None, turned=False)
        adapter_outputs.add_outputs(y, t, [torch.zeros(512, 64, dtype=dtype)], [(0, 512, 1.0)], y, turned=True)
    channel = FP8TrainingConfig.from_recipe("channel", rounding=rounding).recipe
    for width in (256, 300, 6144, 14336):
        x = torch.zeros(16, width, dtype=dtype)
        quantize.quantize_operand(x, new_rows(device="cpu"), channel.x)
        quantize.quantize_folded(x, torch.ones(width), new_rows(device="cpu"), channel.g)
    for shape in ((256, 256), (130, 66)):
        transpose.transpose(torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn))
    from torchao.optim.subclass_4bit import OptimState4bit

    for rows in (64, 65):
        p = torch.zeros(rows, 256, dtype=dtype)
        means = [with_levels(OptimState4bit.zeros(p.shape, signed, 128)) for signed in (True, False)]
        adamw.apply(Step(1, 1e-3, (0.9, 0.95), 1e-8, 0.0, rounding == "nearest"), p, p, *means)
    scores.mask(torch.zeros(1, 2, 128, 128, dtype=dtype), new_rows(device="cpu"), recipe.x, symmetric=False)


if __name__ == "__main__":
    for i, name in enumerate(sys.argv[1].split(",")):
        if i:
            print()
        main(getattr(torch, name), sys.argv[2])
