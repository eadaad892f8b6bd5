"""A rehearsal of a decoder's first training step, which compiles all kernels of the step at once.

Kernels are compiled when they are first launched, so that a first step compiles them one after the other, forward and
then backward: some 18 s for a Llama, of which the GPU works half a second. In a rehearsal one layer, and head and loss
after it, compute forward and backward with launches that only name their kernels (`kernels.launch.compiled_ahead`), and
threads compile those side by side. All values are undefined and dropped: gradients do not reach the Parameters, scaling
states are put back as they were, and random numbers are drawn again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from octavo.decoders.hooks import is_hooked
from octavo.nn.sharded import may_be_freed
from octavo.support import has_fp8_tensor_cores

REHEARSED = "_octavo_rehearsed"  # in a layer that has been called in training
_KINDS: set[tuple[Any, ...]] = set()  # of layers that have been rehearsed in this process
_KNOWN = ("torch.", "transformers.", "peft.", "octavo.")
_TOKENS = 256  # of the loss: its kernels are the same for more
_LOSS: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("octavo_rehearsed_loss", default=None)


@contextmanager
def followed_by(loss: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have a rehearsal in this block compute a loss, too: a function of the last layer's output `[1, T, H]`."""
    token = _LOSS.set(loss)
    try:
        yield
    finally:
        _LOSS.reset(token)


def needs_rehearsal(layer: Any, h: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether a layer is about to take its first training step, on a GPU, and is the first of its kind to do so."""
    if torch.compiler.is_compiling() or not h.is_cuda or not layer.training or REHEARSED in layer.__dict__:
        return False
    if torch.is_inference_mode_enabled() or torch.cuda.is_current_stream_capturing() or may_be_freed():
        return False
    layer.__dict__[REHEARSED] = True
    kind = (type(layer), h.device, h.dtype, *[(p.shape, p.dtype, p.requires_grad) for p in layer.parameters()])
    if kind in _KINDS or not may_rehearse(layer) or kwargs.get("past_key_values") is not None:
        return False
    _KINDS.add(kind)
    return has_fp8_tensor_cores(h.device)


def may_rehearse(layer: Any) -> bool:
    """Whether nobody would notice one more call of a layer: no hooks in it, and no modules of unknown origin."""
    known = all(f"{type(module).__module__}.".startswith(_KNOWN) for module in layer.modules())
    return known and not is_hooked(*layer.modules()) and not any(p._backward_hooks for p in layer.parameters())


def rehearse(
    layer: Any, forward: Callable[[Any, Tensor, dict[str, Any]], Tensor], h: Tensor, kwargs: dict[str, Any]
) -> None:
    """Compile what `forward(layer, h, kwargs)`, the loss and their backward launch."""
    from octavo.kernels.launch import compiled_ahead

    states = [x for m in layer.modules() for x in m.__dict__.values() if isinstance(x, Tensor)]
    before = [state.clone() for state in states]
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    # Backward in this thread, since the block is this thread's; and nothing for the hooks of activation checkpointing.
    keep = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with (
        torch.random.fork_rng([h.device]),
        torch.enable_grad(),
        keep,
        torch.autograd.set_multithreading_enabled(False),
        compiled_ahead(h.device),
    ):
        loss_of = _LOSS.get()
        if loss_of is not None:
            last = torch.zeros_like(h.reshape(1, -1, h.shape[-1])[:, :_TOKENS]).requires_grad_()
            torch.autograd.grad(loss_of(last), last)
        x = torch.empty_like(h).requires_grad_()
        out = forward(layer, x, kwargs)
        torch.autograd.grad(out, [x, *trained], torch.empty_like(out), allow_unused=True)
    for state, saved in zip(states, before, strict=True):
        state.copy_(saved)
