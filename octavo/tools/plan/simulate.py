"""Memory of a step of BDH, from running its own code, forward and backward, on tensors without contents.

`FakeTensorMode` computes shapes and dtypes alone, and every operation's results are counted for as long as something
refers to them: that is what torch's allocator would be asked for. Nothing is compiled, as in `octavo train`. The fake
tensors are a CPU's, since not every build of torch has another device's; where a GPU does otherwise, it is said below.

All sizes are linear in the number of sequences from two on, so two simulated steps tell of any batch. (With one, torch
need not repeat the weights for each sequence.)
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

from octavo.models.bdh import BDH, BDHConfig
from octavo.models.bdh_fused import fuse
from octavo.nn.autocast import fp8_autocast


@dataclass(frozen=True)
class Simulated:
    """Bytes besides the weights: saved for backward, peaks of forward and backward, and the gradients in the latter."""

    kept: int
    forward: int
    backward: int
    gradients: int

    def towards(self, other: "Simulated", steps: int) -> "Simulated":
        """Extrapolate on the line through both."""

        def at(name: str) -> int:
            mine = getattr(self, name)
            return mine + steps * (getattr(other, name) - mine)

        return Simulated(at("kept"), at("forward"), at("backward"), at("gradients"))


def simulate(shape: BDHConfig, code: str, batch: int, seq: int) -> Simulated:
    """Simulate a step of so many sequences, in one of the codes of `options.py`."""
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
        kept, forward = counting.now, counting.most
        counting.begin(lambda: _gradients(model))
        loss.backward()
        backward, gradients = counting.most, counting.seen
    # A GPU quantises q once for both factors of q · qᵀ (`nn/product.py`), a CPU twice: a byte for each number.
    twice = shape.layers * batch * shape.heads * seq * shape.neurons if code == "bdh-fp8" else 0
    less = weights + twice
    return Simulated(kept - less, forward - less, backward - less, gradients)


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
    """Counter of bytes. `now`: all live tensors. `most`: the peak since `begin`; `seen`: the value of `look` at it."""

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
