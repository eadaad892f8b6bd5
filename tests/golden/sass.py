"""Machine code of kernels for Hopper, searched for a fault of ptxas: an operand that is the stack pointer.

    python -m tests.golden.sass                     # everything: many minutes of CPU; exit status 1 if any is found
    python -m tests.golden.sass "few tokens" gated  # launches with one of these in their names

ptxas 12.9, which Triton 3.6 brings, makes wrong code of some FP8 bytes that are packed two by two (`cvt….e4m3x2.f32`)
and then taken apart or put into words: where the pair should be it reads R1, in which is the stack's address.

    F2FP.F16.E4M3.UNPACK_B R2, R1            LOP3.LUT R30, R1, 0xffff, RZ, 0xc0, !PT

PTX does not show it, and the interpreter has no such instructions (docs/LOG.md, 2026-11-17: halves of x). Moves and
sums of R1 are not counted, because addresses of the stack are made by them: nothing found is not a proof.
"""

import argparse
import multiprocessing
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import triton

from benchmarks.hopper import compile_for_hopper
from tests.golden.ptx import Job, launch_of, name_of, names

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
# The stack's own: moving its pointer, addresses relative to it, and addresses of what is in it.
OF_STACK = re.compile(r"\[[^\]]*\bR1\b[^\]]*\]|^(?:@\S+ )?(?:LDC|IADD3|VIADD|MOV|IMAD\.MOV\.U32|S2R|LEA|UIADD3)\b.*")


def faults(sass: str) -> list[str]:
    """Instructions that read the stack pointer and do not concern the stack."""
    every = [" ".join(text.split()) for text in INSTRUCTION.findall(sass)]
    return [text for text in every if re.search(r",[^\[]*\bR1\b", OF_STACK.sub("", text))]


def _search(job: Job) -> list[str]:
    """The faults of all kernels that a launch starts, each with the kernel's name."""
    from tests.kernels.launches import let_launches_overlap

    found: list[str] = []

    def compile_instead(kernel, *args, grid, warmup, **constants):  # noqa: ARG001
        compiled = compile_for_hopper(kernel, args, constants)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            sass = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True).stdout
        found.extend(f"{kernel.fn.__name__}: {text}" for text in faults(sass))

    triton.runtime.jit.JITFunction.run = compile_instead
    let_launches_overlap()
    launch_of(job)()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts of names; default: everything")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    wanted, wrong = names(options.parts), 0
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for job, found in zip(wanted, pool.map(_search, wanted), strict=True):
            for text in found:
                print(f"{name_of(job)}: {text}", flush=True)
            wrong += bool(found)
    print(f"{wrong} of {len(wanted)} launches have faults")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
