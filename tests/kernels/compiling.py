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
from octavo.kernels.tiles import CHANNEL
from tests.golden.ptx import skip_ptxas
from tests.kernels.launches import launches, let_launches_overlap

REGISTER = re.compile(r"%[a-z]+\d+")
WITHOUT_RESULT = ("st.", "red.", "bar.", "bra", "ret", "fence.")
# Each kernel with what moves bytes between threads, or waits. All of them: `python -m tests.golden.ptx`.
CHECKED = (
    *("quantize delayed g", "quantize channel g", "quantize block g", "quantize block w both", "quantize mx g"),
    *("quantize block, channel wgrad g both (256", "quantize rows", "quantize folded", "quantize by scales"),
    *("gated quantize backward delayed silu", "gated quantize backward from saved silu"),
    "gated quantize and save silu",
    *("gated blocks block silu 256", "gated blocks block, channel wgrad silu 256", "gated blocks mx silu 256"),
    *("gated blocks backward block silu 256", "gated blocks backward block, channel wgrad silu 256"),
    *("gated blocks backward mx silu 256", "cross entropy quantize both", "gated low rank silu 256 saved"),
    *("gated low rank backward silu 256 with h", "adapters", "transpose", "adamw 4 bits", "bdh causal delayed (128"),
    *("norm backward 4096", "rotary", "decode 128", "decode 256", "decode store 128", "decode rotary and store 128"),
    *("few tokens", "sampling", "slots"),
    # To FP32 its bytes do change hands, before a single store, which comes out right (tests/gpu/test_lora_on_gpu.py).
    *(f"dequantize (256, 256) by (256, 1) to torch.{dtype}" for dtype in ("bfloat16", "float16")),
)


def unwritten(ptx):
    """Registers that are read and never written: what ptxas may do with the others in the same word is anything."""
    read, written = set(), set()
    for statement in re.sub("//.*", "", ptx).replace("\n", ";\n").split(";"):
        actual = re.match(r"\s*(?:@!?(%\w+)\s+)?([a-z][\w.:]*)\s+(.*)", statement)
        if actual is None:
            continue
        predicate, operation, operands = actual.groups()
        result = "" if operation.startswith(WITHOUT_RESULT) else re.match(r"\{[^}]*\}|[^,;]*", operands)[0]
        written.update(REGISTER.findall(result))
        read.update(REGISTER.findall(f"{predicate} {operands[len(result) :]}"))
    return read - written


def waits(ptx):
    """Where a kernel waits for the launch before it: how many loads and stores come first, for each time it does."""
    parts = ptx.split("griddepcontrol.wait")
    accesses = r"\b(?:ld|st|red|atom)\.global|\bcp\.async\.c[ag]\.shared\.global"
    return [len(re.findall(accesses, "".join(parts[: i + 1]))) for i in range(len(parts) - 1)]


def read_before_waiting(ptx, names):
    """The parameters, of a kernel whose parameters have these names, from which it reads before it waits."""
    origins, found = {}, set()
    for statement in ptx.split("griddepcontrol.wait")[0].split(";"):
        text = re.sub("//.*", "", statement).strip()
        parameter = re.search(r"ld\.param\.\S+\s+(%\w+), \[\w+_param_(\d+)\]", text)
        if parameter is not None:
            origins[parameter[1]] = {int(parameter[2])}
            continue
        if re.search(r"\bld\.global|\bcp\.async\.c[ag]\.shared\.global", text):
            address = re.findall(r"\[([^\]]*)\]", text)[-1]
            found |= {number for register in REGISTER.findall(address) for number in origins.get(register, ())}
            continue
        registers = REGISTER.findall(re.sub(r"^@!?%\w+", "", text))
        if len(registers) > 1:  # a result, and what it is computed from
            origins[registers[0]] = {number for each in registers for number in origins.get(each, ())}
    return sorted(names[number] for number in found if names[number].endswith("_ptr"))


def compile_instead(kernel, *args, grid, warmup, **constants):  # noqa: ARG001
    """In place of `JITFunction.run`."""
    compiled = compile_for_hopper(kernel, args, constants)
    names = [name for name in kernel.arg_names if name not in constants]
    names = [name for name, value in zip(names, args, strict=True) if value is not None]
    conversions = [line for line in compiled.asm["ttgir"].splitlines() if "ttg.convert_layout" in line]
    actual = {
        "kernel": kernel.fn.__name__,
        "bytes_turned": sum("xf8E" in line for line in conversions),
        "conversions": len(conversions),
        "shared": compiled.metadata.shared,
        "unwritten": sorted(unwritten(compiled.asm["ptx"])),
        "may_wait": constants.get("OVERLAPS", False),
        "waits": waits(compiled.asm["ptx"]),
        "reads_weights": kernel.fn.__name__ in ("project_kernel", "whole_rows_kernel"),
        "read_before_waiting": read_before_waiting(compiled.asm["ptx"], names),
        "stores_first": len(
            re.findall(r"\b(?:st|red|atom)\.global", compiled.asm["ptx"].split("griddepcontrol.wait")[0])
        ),
        "needs_nothing": kernel.fn.__name__ == "columns_kernel" and constants["MODE"] != CHANNEL.value,
    }
    if len(sys.argv) > 3:
        path = Path(sys.argv[3]) / f"{actual['kernel']}-{len(list(Path(sys.argv[3]).iterdir()))}"
        path.with_suffix(".ptx").write_text(compiled.asm["ptx"])
    print(json.dumps(actual), flush=True)


def main(dtype: torch.dtype, rounding: str) -> None:
    triton.runtime.jit.JITFunction.run = compile_instead
    let_launches_overlap()
    for name, run in launches(dtype, rounding):
        if name.startswith(CHECKED):
            run()


if __name__ == "__main__":
    skip_ptxas()
    for i, name in enumerate(sys.argv[1].split(",")):
        if i:
            print()
        main(getattr(torch, name), sys.argv[2])
