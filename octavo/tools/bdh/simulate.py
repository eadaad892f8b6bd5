"""The memory of a step of BDH, found by running its own code, forward and backward, on tensors without contents.

`FakeTensorMode` computes only shapes and dtypes, and the results of every operation are counted for as long as
something refers to them: that is what torch's allocator would be asked for. Nothing is compiled.
The fake tensors are on the CPU, since not every build of torch has another device; where a GPU differs, a comment says
so.

All sizes are linear in the number of sequences from two on, so two simulated steps determine those of any batch. (With
one sequence, torch need not repeat the weights for each.)
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.models.bdh import BDH, BDHConfig, fuse
from octavo.nn.autocast import fp8_autocast


@dataclass(frozen=True)
class Simulated:
    """Bytes beside the weights: saved for backward when forward ends; the peaks of forward and of backward; and the
    gradients that are part of the latter."""

    saved: int
    forward: int
    backward: int
    gradients: int

    def towards(self, other: "Simulated", steps: int) -> "Simulated":
        """Extrapolate linearly: `steps` times the difference to `other`, from here."""

        def at(name: str) -> int:
            mine = getattr(self, name)
            return mine + steps * (getattr(other, name) - mine)

        return Simulated(at("saved"), at("forward"), at("backward"), at("gradients"))


def simulate(shape: BDHConfig, code: str, batch: int, seq: int) -> Simulated:
    """Simulate a step of `batch` sequences. `code`: one of `octavo.tools.bdh.CODES`."""
    if batch == 1:
        return _sequences(shape, code, 1, seq)
    return _sequences(shape, code, 2, seq).towards(_sequences(shape, code, 3, seq), batch - 2)


@lru_cache(maxsize=64)
def _sequences(shape: BDHConfig, code: str, batch: int, seq: int) -> Simulated:
    with FakeTensorMode(allow_non_fake_inputs=True), _Counting() as counting:
        model = BDH(shape)
        weights = counting.now
        tokens = torch.zeros(batch, seq, dtype=torch.int64)
        with _precision(model, code):
            loss = model(tokens, tokens)[1]
        saved, forward = counting.now, counting.most
        counting.begin(lambda: _gradients(model))
        loss.backward()
        backward, gradients = counting.most, counting.seen
    # A GPU quantises q once for both factors of q · qᵀ (`nn/product.py`), a CPU twice: one more byte per element.
    twice = shape.layers * batch * shape.heads * seq * shape.neurons if code == "bdh-fp8" else 0
    less = weights + twice
    return Simulated(saved - less, forward - less, backward - less, gradients)


@contextmanager
def _precision(model: BDH, code: str) -> Iterator[None]:
    if code == "bdh-fp32":
        yield
        return
    if code == "bdh-fused":
        fuse(model)
    with torch.autocast("cpu", torch.bfloat16), fp8_autocast(model=model, enabled=code == "bdh-fp8"):
        yield


def _gradients(model: nn.Module) -> int:
    return sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


class _Counting(TorchDispatchMode):
    """Counts the bytes of tensors: `now`; `most` since `begin`; `seen`, the result of `look` at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = self.seen = 0
        self._sizes: dict[int, int] = {}
        self._look: Callable[[], int] = lambda: 0

    def begin(self, look: Callable[[], int]) -> None:
        self.most, self._look = self.now, look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        weakref.finalize(storage, self._forget, key)
        if self.now > self.most:
            self.most, self.seen = self.now, self._look()

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
