"""PTX of every kernel, for Hopper, as hashes: `ptx.json` is what a change that should not change kernels is checked by.

    python -m tests.golden.ptx                        # compile everything, print what differs; exit status 1 if any
    python -m tests.golden.ptx gated "quantize mx"    # only launches with one of these in their names
    python -m tests.golden.ptx --write                # record anew: after a change of a kernel, and its reason
    python -m tests.golden.ptx --folder DIR           # and write each PTX there, to compare two of them

All takes some four minutes of CPU. A launch (`tests/kernels/launches.py`) may compile several kernels, which are
numbered. Names of functions, files and lines do not count, so that moves and renames do not show. Another Triton makes
other PTX: the file says which it was.
"""

import argparse
import ast
import hashlib
import json
import multiprocessing
import re
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import torch
import triton

from benchmarks.hopper import compile_for_hopper

Job = tuple[int, str]  # which of SETUPS, and a launch

FILE = Path(__file__).with_name("ptx.json")
SETUPS = [
    (torch.bfloat16, "nearest"),
    (torch.bfloat16, "stochastic"),
    (torch.float32, "nearest"),
    (torch.float16, "nearest"),
]
# In FP16 only what treats 16 bits in pairs, or has its own range.
FP16 = (
    "quantize channel",
    "quantize rows",
    "gated blocks backward block silu 256",
    "cross entropy",
    "adapters",
    "few tokens",
)


def normalised(ptx: str) -> str:
    """Without debug sections, comments, locations and the kernel's name."""
    ptx = ptx.split(".section")[0]
    name = re.search(r"\.entry\s+([\w$]+)", ptx)
    assert name is not None
    ptx = re.sub(rf"\b{re.escape(name[1])}", "kernel", ptx)
    lines = (line.split("//")[0].strip() for line in ptx.splitlines())
    debugging = (".loc", ".file", "$L__tmp", "$L__func", "{ .b8")
    return "\n".join(line for line in lines if line and not line.startswith(debugging))


def skip_ptxas() -> None:
    """Leave out the last stage, which takes half of the time; its results go to a cache of their own."""
    from triton.backends.nvidia.compiler import CUDABackend

    CUDABackend.make_cubin = lambda *_: b""
    if Path(triton.knobs.cache.dir).name != "ptx":
        triton.knobs.cache.dir = str(Path(triton.knobs.cache.dir) / "ptx")


def names(parts: list[str]) -> list[Job]:
    """All launches with one of these parts in their names."""
    return [
        (setup, launch)
        for setup, (dtype, rounding) in enumerate(SETUPS)
        for launch in _launches(setup)
        if (dtype != torch.float16 or launch.startswith(FP16))
        and (not parts or any(part in name_of((setup, launch)) for part in parts))
    ]


def name_of(job: Job) -> str:
    (dtype, rounding), launch = SETUPS[job[0]], job[1]
    return f"{launch} {str(dtype).removeprefix('torch.')} {rounding}"


def launch_of(job: Job) -> Callable[[], object]:
    return _launches(job[0])[job[1]]


@cache
def _launches(setup: int) -> dict[str, Callable[[], object]]:
    from tests.kernels.launches import launches

    return dict(launches(*SETUPS[setup]))


def _compile(job: Job) -> list[tuple[str, str]]:
    """Of every kernel that a launch starts, its name and its PTX."""
    from tests.kernels.launches import let_launches_overlap

    compiled: list[tuple[str, str]] = []

    def compile_instead(kernel, *args, grid, warmup, **constants):  # noqa: ARG001
        compiled.append((kernel.fn.__name__, normalised(compile_for_hopper(kernel, args, constants).asm["ptx"])))

    skip_ptxas()
    triton.runtime.jit.JITFunction.run = compile_instead
    let_launches_overlap()
    launch_of(job)()
    assert compiled, f"{name_of(job)}: nothing was launched"
    return compiled


def hashes(parts: list[str], folder: Path | None = None, jobs: int = 1) -> dict[str, str]:
    """Of all launches with one of these parts in their names: the name of a kernel's variant, and its hash."""
    wanted, hash_of, kernels = names(parts), {}, set()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for job, compiled in zip(wanted, pool.map(_compile, wanted, chunksize=4), strict=True):
            for i, (kernel, ptx) in enumerate(compiled):
                kernels.add(kernel)
                hash_of[f"{name_of(job)} #{i}"] = hashlib.sha256(ptx.encode()).hexdigest()[:16]
                if folder is not None:
                    (folder / f"{re.sub('[^a-z0-9]+', '-', name_of(job).lower())}-{i}.ptx").write_text(ptx)
    if not parts:
        missing = kernels_of_library() - kernels
        assert not missing, f"tests/kernels/launches.py launches no {', '.join(sorted(missing))}"
    return hash_of


def kernels_of_library() -> set[str]:
    """The names of all functions that are launched: they end in `_kernel`."""
    trees = [ast.parse(path.read_text()) for path in Path("octavo").rglob("*.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    compiled = [node for node in functions if any("triton.jit" in ast.unparse(d) for d in node.decorator_list)]
    return {node.name for node in compiled if node.name.endswith("_kernel")}


def compare(parts: list[str], folder: Path | None = None, jobs: int = 1) -> list[str]:
    """What differs from the file, by name."""
    recorded = json.loads(FILE.read_text())["kernels"]
    actual = hashes(parts, folder, jobs)
    expected = {name for name in recorded if not parts or any(part in name for part in parts)}
    return sorted({name for name, value in actual.items() if recorded.get(name) != value} | (expected - set(actual)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts of names; default: everything")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--write", action="store_true", help="record what is found")
    parser.add_argument("--folder", type=Path, help="write the PTX there, too")
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    if options.write:
        before = json.loads(FILE.read_text())["kernels"] if options.parts and FILE.exists() else {}
        kernels = before | hashes(options.parts, options.folder, options.jobs)
        FILE.write_text(json.dumps({"triton": triton.__version__, "kernels": kernels}, indent=0) + "\n")
        print(f"{len(kernels)} kernels recorded")
        return 0
    different = compare(options.parts, options.folder, options.jobs)
    print("\n".join(different) or "no difference")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
