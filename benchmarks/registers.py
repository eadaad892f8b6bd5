"""Compiled kernels for a Hopper GPU, on any machine: registers, spills, programs that fit.

    python benchmarks/registers.py                     # quantising and SwiGLU at the shapes of an 8B
    python benchmarks/registers.py "block g" swiglu    # what has these in its name
    python benchmarks/registers.py --sass DIR block    # and the machine code

Nothing runs. Triton compiles what `octavo bench --kernels` would launch; its own `ptxas` and `cuobjdump` say the rest:

    programs    on a multiprocessor: launched, and how many fit beside each other. They share out the tiles, so if 3 are
                launched and 2 fit, the third begins when the others are done, and runs as long as they did
    loop        instructions of the longest loop, for each element of a tile. Counts what is done on some tiles only,
                such as counting underflow

The exit status is 1 where a last round of programs is far from full, or something spills.
"""

import argparse
import math
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from hopper import compile_for_hopper
from rich.console import Console
from rich.table import Table

from octavo.kernels import gated, quantize
from octavo.kernels.gated import blocks
from octavo.numerics import FP8TrainingConfig
from octavo.numerics.scaling import new_states
from octavo.tools.bench.kernels import Work, works
from octavo.tools.shapes import make_case

MULTIPROCESSORS = 132  # of an H100 or H200; each has
REGISTERS, SHARED, WARPS = 65_536, 227 * 1024, 64
SHARED_BY_SYSTEM = 1024  # of each program's
TILES = (("TILE_R", "TILE_C"), ("TILE_M", "TILE_F"), ("PART", "PARTS"))
WASTE = 1.1  # rounds of programs that fit, over as many as would do if the last one were full
MANY = 4  # rounds: then programs are short, and begin as others end
BIN = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Compiled:
    kernel: str
    warps: int
    registers: int
    spilled: int
    shared: int
    launched: float
    fit: int
    per_element: float

    @property
    def is_fine(self) -> bool:
        rounds = self.launched / self.fit
        return not self.spilled and (rounds <= 1 or rounds >= MANY or math.ceil(rounds) <= WASTE * rounds)


class Compiler:
    """Stand-in for launching kernels: compiles them, and records the results."""

    def __init__(self, sass: Path | None = None) -> None:
        self.sass = sass
        self.kernels: list[Compiled] = []

    def __enter__(self) -> "Compiler":
        self._run: Any = triton.runtime.jit.JITFunction.run
        self._count = gated.multiprocessors
        launch: Any = triton.runtime.jit.JITFunction
        launch.run = lambda kernel, *args, grid, warmup, **constants: self.compile(kernel, args, grid, constants)  # noqa: ARG005
        self._count_as(lambda _: MULTIPROCESSORS)
        return self

    def __exit__(self, *_: Any) -> None:
        launch: Any = triton.runtime.jit.JITFunction
        launch.run = self._run
        self._count_as(self._count)

    @staticmethod
    def _count_as(multiprocessors: Any) -> None:
        for module in (quantize, gated, blocks):
            module.multiprocessors = multiprocessors
            module._LAUNCHES.clear()

    def compile(self, kernel: Any, args: tuple[Any, ...], grid: tuple[int, ...], constants: dict[str, Any]) -> None:
        compiled = compile_for_hopper(kernel, args, constants)
        self.kernels.append(self._look(kernel.fn.__name__, compiled, grid, constants))

    def _look(self, name: str, compiled: Any, grid: tuple[int, ...], constants: dict[str, Any]) -> Compiled:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage, code = (ask(what, file.name) for what in ("-res-usage", "-sass"))
        if self.sass is not None:
            self.sass.mkdir(parents=True, exist_ok=True)
            (self.sass / f"{len(self.kernels):03}-{name}.sass").write_text(code)
        used = {what: int(number) for what, number in re.findall(r"\b(REG|STACK):(\d+)", usage)}
        registers, stack = used["REG"], used["STACK"]
        warps, shared = constants["num_warps"], compiled.metadata.shared
        fit = min(
            REGISTERS // (-(-registers // 8) * 8 * 32 * warps), SHARED // (shared + SHARED_BY_SYSTEM), WARPS // warps
        )
        elements = next((constants[a] * (constants[b] if b != "PARTS" else 1) for a, b in TILES if a in constants), 1)
        per_element = longest_loop(code) * warps * 32 / elements
        return Compiled(name, warps, registers, stack, shared, grid[0] / MULTIPROCESSORS, fit, per_element)


def ask(what: str, file: str) -> str:
    return subprocess.run([BIN / "cuobjdump", what, file], capture_output=True, text=True, check=True).stdout


def longest_loop(code: str) -> int:
    """Return the number of instructions between the target of a backward jump and the jump."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)
    line_of = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    longest = 0
    for i, (_, text) in enumerate(lines):
        jump = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) in line_of:
            longest = max(longest, i - line_of[int(jump[1], 16)] + 1)
    return longest


def launch(work: Work) -> None:
    """Run `work.run` as on a GPU, on tensors without contents."""
    recipe = FP8TrainingConfig.from_recipe(work.recipe).recipe
    inputs = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in work.shapes]
    row, columns = new_states(device="meta"), work.layout == "columns"
    if work.operand in ("x", "w", "g"):
        how = getattr(recipe, work.operand)
        scale = row[0] if columns and how.delayed else None
        if not quantize.can_quantize(inputs, how):
            return
        quantize.quantize_group(inputs, row, how, record=not columns, layout=work.layout, scale=scale)
        return
    gate_up, per_tensor = inputs[-1], gated.can_quantize(inputs[-1], recipe.x, recipe.g)
    # Without a fused kernel, h is quantised as any other matrix.
    if "backward" in work.operand:
        if per_tensor:
            scale = torch.empty((), device="meta")
            gated.gated_quantize_backward(*inputs, scale, row, recipe.g, recipe.x, "silu")
        elif blocks.can_quantize_backward(gate_up, recipe.g, recipe.x):
            blocks.gated_quantize_backward(*inputs, row, recipe.g, recipe.x, "silu")
    elif per_tensor:
        gated.gated_quantize(gate_up, row, recipe.x, "silu", record=True)
    elif blocks.can_quantize(gate_up, recipe.x):
        blocks.gated_quantize(gate_up, row, recipe.x, "silu", record=True)


def main(arguments: list[str] | None = None) -> list[tuple[str, Compiled]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names, such as 'block g columns'; default: everything")
    parser.add_argument("--preset", default="8b", help="of `octavo bench`")
    parser.add_argument("--sass", type=Path, metavar="DIR", help="write the machine code there")
    options = parser.parse_args(arguments)
    case = make_case(
        preset=options.preset, config=None, layers=None, tokens=8192, seq=2048, seed=0, device="cpu", force=True
    )
    table = Table("", "kernel", "warps", "registers", "spilled", "shared", "programs", "fit", "loop")
    rows = []
    with Compiler(options.sass) as compiler:
        for work in works(case):
            name = f"{work.recipe} {work.operand} {work.layout}"
            if options.names and not any(part in name for part in options.names):
                continue
            before = len(compiler.kernels)
            launch(work)
            rows += [(name, kernel) for kernel in compiler.kernels[before:]]
    for name, kernel in rows:
        figures = (kernel.warps, kernel.registers, kernel.spilled, kernel.shared)
        programs = (f"{kernel.launched:.1f}", str(kernel.fit), f"{kernel.per_element:.1f}")
        style = "" if kernel.is_fine else "bold red"
        table.add_row(name, kernel.kernel, *map(str, figures), *programs, style=style)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return rows


if __name__ == "__main__":
    sys.exit(not all(kernel.is_fine for _, kernel in main()))
