"""Launching Triton kernels without working everything out again.

Triton's own launch binds arguments, builds a key from their types and alignments, checks globals and asks the driver
about every pointer, every time; a decoder layer makes some forty launches, and for a 1B model all that Python took
longer than the GPU (docs/LOG.md). `Launches` are worked out once for tensors of one kind (shapes, strides, dtypes,
alignments, device). Running them allocates, draws seeds, and calls compiled kernels with plain addresses.

A host function looks its launches up, and builds them where there are none yet:

    key = (activation, kind(gate_up))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build(gate_up, activation))
    return launches.run(gate_up)

Compiling a kernel takes a third of a second, and a training step needs some fifty of them, one after the other. Within
`compiled_ahead`, launches only name what is to be compiled, and several threads do so at once.

Launches may overlap: the next begins while the last programs of the one before are at work, and waits for it where it
needs what that has left (`tiles.follow`), so that no time passes between them.
"""

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from octavo.numerics.config import OperandRecipe

SEED = object()  # stands last among a launch's numbers: drawn anew for every run, one for all launches of it


@dataclass
class _Launch:
    kernel: Any
    grid: tuple[int, ...]
    tensors: tuple[int, ...]
    numbers: tuple[Any, ...]
    constants: dict[str, Any]
    seeded: bool
    start: Callable[..., None] | None = None  # once it is compiled
    function: tuple[Any, ...] = ()
    rest: tuple[Any, ...] = ()

    def compile_and_run(self, tensors: Sequence[Tensor], seed: int) -> None:
        """Launch through Triton, which compiles the kernel."""
        numbers = (*self.numbers, seed) if self.seeded else self.numbers
        compiled = self.kernel[self.grid](*[tensors[i] for i in self.tensors], *numbers, **self.constants)
        if tensors[0].is_cuda:
            self.rest = tuple(self.constants[name] for name in self.kernel.arg_names if name in self.constants)
            self.start, self.function = _start_of(compiled)

    def name(self, tensors: Sequence[Tensor], named: list[Any]) -> None:
        """Have Triton compile the kernel, in another thread where that has been arranged; not launched."""
        numbers = (*self.numbers, 0) if self.seeded else self.numbers
        given = [tensors[i] for i in self.tensors]
        named.append(self.kernel.warmup(*given, *numbers, grid=self.grid, **self.constants))

    def again(self, addresses: Sequence[int], stream: int, seed: int) -> None:
        """Launch the compiled kernel directly."""
        assert self.start is not None
        grid = self.grid
        across = grid[1] if len(grid) == 2 else 1
        given = [addresses[i] for i in self.tensors]
        if self.seeded:
            self.start(grid[0], across, 1, stream, *self.function, *given, *self.numbers, seed, *self.rest)
        else:
            self.start(grid[0], across, 1, stream, *self.function, *given, *self.numbers, *self.rest)


def _start_of(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function that starts a compiled kernel, and its arguments between the stream and the kernel's own.

    Triton's launcher asks for memory that some kernels need, then calls a function in C, which can be called at once
    for those that need none.
    """
    launcher, rest = compiled.run, (compiled.packed_metadata, None, None, None)
    names = ("launch", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    if not all(hasattr(launcher, name) for name in names):
        return launcher, (compiled.function, *rest)
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return launcher, (compiled.function, *rest)
    how = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
    return launcher.launch, (compiled.function, *how, *rest)


@dataclass
class Launches:
    """Launches over tensors that are given and tensors that it makes, both named by number, the given ones first."""

    given: int
    overlaps: bool = False  # kernels that know how to wait begin early
    follows: bool = False  # the first of them, too: whatever comes before, it waits for that at its start
    results: tuple[int, ...] = ()
    _made: list[tuple[Callable[..., Tensor], tuple[int, ...], torch.dtype]] = field(default_factory=list)
    _launches: list[_Launch] = field(default_factory=list)

    def make(self, shape: Sequence[int], dtype: torch.dtype, *, zeros: bool = False) -> int:
        self._made.append((torch.zeros if zeros else torch.empty, tuple(shape), dtype))
        return self.given + len(self._made) - 1

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        tensors: Sequence[int],
        numbers: Sequence[Any],
        constants: dict[str, Any],
    ) -> None:
        """`kernel[grid](*tensors, *numbers, **constants)`, in the kernel's order."""
        if "OVERLAPS" in kernel.arg_names:
            constants = constants | {"OVERLAPS": self.overlaps}
            if self.overlaps and (self._launches or self.follows):
                constants["launch_pdl"] = True
        seeded = bool(numbers) and numbers[-1] is SEED
        numbers = tuple(numbers[:-1] if seeded else numbers)
        self._launches.append(_Launch(kernel, grid, tuple(tensors), numbers, constants, seeded))

    def run(self, *given: Tensor) -> list[Tensor]:
        """Allocate, launch everything, and return the tensors named by `results`."""
        device = given[0].device
        tensors = [*given, *[make(shape, dtype=dtype, device=device) for make, shape, dtype in self._made]]
        if device.index is None or device.index == torch._C._cuda_getDevice():
            self._launch(tensors, device.index)
        else:
            with torch.cuda.device(device):
                self._launch(tensors, device.index)
        return [tensors[i] for i in self.results]

    def _launch(self, tensors: Sequence[Tensor], index: int | None) -> None:
        named = _NAMED.get()
        if named is not None:
            for launch in self._launches:
                if launch.start is None:
                    launch.name(tensors, named)
            return
        seed = _seed() if any(launch.seeded for launch in self._launches) else 0
        runtime = triton.knobs.runtime
        watched = any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))
        if index is None or watched or self._launches[-1].start is None:
            for launch in self._launches:
                launch.compile_and_run(tensors, seed)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        stream = torch._C._cuda_getCurrentRawStream(index)
        for launch in self._launches:
            launch.again(addresses, stream, seed)


_NAMED: ContextVar[list[Any] | None] = ContextVar("octavo_named", default=None)
_THREADS = 16


@contextmanager
def compiled_ahead(device: torch.device) -> Iterator[None]:
    """Compile the kernels of all launches of this block and this thread, side by side, and launch none of them.

    Tensors that they would have written are undefined: run a computation here whose results nobody needs. Has compiled
    and loaded all of them when it is left.
    """
    from triton.runtime._async_compile import AsyncCompileMode

    named: list[Any] = []
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        with AsyncCompileMode(pool):
            token = _NAMED.set(named)
            try:
                yield
            finally:
                _NAMED.reset(token)
        for _ in pool.map(lambda kernel: _load(kernel, device), {id(kernel): kernel for kernel in named}.values()):
            pass  # raises what was raised in a thread


def launch_once(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """`kernel[grid](*arguments, **constants)`, through Triton, for what is launched seldom."""
    named = _NAMED.get()
    if named is None:
        kernel[grid](*arguments, **constants)
    else:
        named.append(kernel.warmup(*arguments, grid=grid, **constants))


def _load(kernel: Any, device: torch.device) -> None:
    """Load a kernel that has been compiled, and build the function that launches it."""
    torch.cuda.set_device(device)  # of this thread
    kernel = kernel.result() if hasattr(kernel, "result") else kernel
    _ = kernel.run  # a property that loads


class LaunchCache(dict[tuple[Any, ...], Launches]):
    """Launches by what they were built for. Not for ever: sequence lengths may change with every step."""

    LIMIT = 2048

    def add(self, key: tuple[Any, ...], launches: Launches) -> Launches:
        if len(self) >= self.LIMIT:
            self.clear()
        self[key] = launches
        return launches


def seed_of(*recipes: OperandRecipe) -> Any:
    """The number for a kernel's seed: drawn in every run if anything is rounded at random."""
    return SEED if any(recipe.rounding == "stochastic" for recipe in recipes) else 0


def kind(*tensors: Tensor) -> tuple[Hashable, ...]:
    """All that launches may depend on. The tensors are on one device."""
    kinds = [(x.shape, x.stride(), x.dtype, x.data_ptr() & 15) for x in tensors]
    return (tensors[0].get_device(), *kinds)


def _seed() -> int:
    return int(torch.randint(2**31 - 2, (), device="cpu"))
