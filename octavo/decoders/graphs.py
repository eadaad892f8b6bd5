"""CUDA graphs: the layers of a decoder recorded once, forward and backward, and started by one call each.

A training step of a small model is many short kernels. With adapters a 1B makes some 1,500 launches, and Python takes
longer over them than the GPU over computing (docs/LOG.md). A recording has them all, with their addresses:

    forward    input → static, replay → hidden states
    backward   gradient → static, replay → gradients of all parameters, which are copied out

What is recorded is what ran at the time: shapes, adapters that were active, addresses of weights, what is trained
(`graph_state.py`). Values may change, so optimisers go on as before. A step that differs in any of it is computed
without, and recorded in its turn if it comes again. A recording holds the memory of its activations for good.
"""

import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from octavo.decoders import attention
from octavo.decoders.classes import HEAD
from octavo.decoders.graph_state import autocast_of, state_of, who_watches
from octavo.nn.linear import LinearInFP8
from octavo.nn.sharded import capture_error_mode
from octavo.nn.versions import check_versions, versions_of

_MARK = "_octavo_graphs"
AFTER = 2  # times that a shape is computed before it is recorded: what is compiled is compiled then
MOST = 4  # recordings
CHANGES = 3  # times in a row that a recording may be out of date at once
WITHOUT = "octavo.use_cuda_graphs(model, False) trains without"


def use_cuda_graphs(model: nn.Module, enabled: bool = True, *, after: int = AFTER, most: int = MOST) -> None:
    """Replay the training steps of a fused decoder from CUDA graphs, which leaves its host little to do.

    Call it when the model is complete, adapters included. For steps of the same shape, such as text cut to one length:
    each shape is recorded when it has been computed `after` times, up to `most` shapes. Steps with padding, with
    `position_ids` (as where several sequences are packed into a row), with gradient checkpointing or without gradients
    are computed as before. What cannot be recorded is an error when its turn comes: a model with hooks, which a replay
    would not call, one that waits for the GPU in its forward, or one that is never twice the same.
    """
    causal = _fused_model(model)
    if not enabled:
        forget(causal)
        return
    device = causal.lm_head.weight.device
    if device.type != "cuda":
        raise ValueError(f"use_cuda_graphs: the model is on {device}; move it to a GPU first, model.to('cuda')")
    others = {p.device for p in causal.parameters()} - {device}
    if others:
        raise ValueError(
            f"use_cuda_graphs: the model is on {device} and {', '.join(map(str, others))}, and a graph is of one GPU; "
            "load it with device_map={'': 0}"
        )
    linears = [module for module in causal.modules() if isinstance(module, LinearInFP8)]
    if any(recipe.rounding == "stochastic" for m in linears for recipe in (m.recipe.x, m.recipe.w, m.recipe.g)):
        raise ValueError("use_cuda_graphs: stochastic rounding draws new numbers in every step; use rounding='nearest'")
    causal.__dict__[_MARK] = _Graphs(causal, linears, after, most)


def forget(causal: nn.Module) -> None:
    """Drop the recordings of a model, and record no more: they hold for the recipe that it had."""
    causal.__dict__.pop(_MARK, None)


def replayed(causal: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The last hidden states from a graph; None if this step is not, or not yet, one for it."""
    graphs = causal.__dict__.get(_MARK)
    return None if graphs is None else graphs.run(kwargs)


def reserved_bytes(model: nn.Module) -> int:
    """Memory that recordings hold beyond what torch counts as allocated."""
    graphs = _fused_model(model).__dict__.get(_MARK)
    pools = set() if graphs is None else {recorded.pool for recorded in graphs.recorded.values()}
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) in pools] if pools else []
    return sum(segment["total_size"] - segment["allocated_size"] for segment in segments)


def recordings(model: nn.Module) -> int:
    """How many steps have been recorded."""
    graphs = _fused_model(model).__dict__.get(_MARK)
    return 0 if graphs is None else len(graphs.recorded)


def _fused_model(model: nn.Module) -> Any:
    for module in model.modules():
        if HEAD in module.__dict__:  # PEFT's wrappers have what their model has
            return module
    raise ValueError(
        f"use_cuda_graphs: {type(model).__name__} is not a decoder that Octavo has fused; load it by "
        "FastLanguageModel, or call convert_to_fp8 first"
    )


class _Graphs:
    def __init__(self, causal: Any, linears: Sequence[LinearInFP8], after: int, most: int) -> None:
        self.decoder, self.after, self.most = causal.model, after, most
        self.adapted = [module for module in causal.modules() if hasattr(module, "_active_adapter")]
        self.managers = list({id(m.scaling): m.scaling for m in linears}.values())
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self.recorded: dict[Any, _Recorded] = {}
        self._seen: dict[Any, int] = {}
        self._replays: dict[Any, int] = {}  # since it was recorded
        self._changes: dict[Any, int] = {}  # in a row that came at once

    def __getstate__(self) -> dict[str, Any]:
        """Leave the recordings out: a copy of a model, or one that is pickled, makes its own."""
        return {name: self.__dict__[name] for name in ("decoder", "after", "most", "adapted", "managers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def run(self, kwargs: dict[str, Any]) -> Tensor | None:
        tokens = _only_tokens(kwargs)
        if tokens is None or _wants_more(self.decoder):
            return None
        adapters = ((getattr(m, "merged", False), m.disable_adapters, *m.active_adapters) for m in self.adapted)
        key = (tokens.shape, autocast_of(tokens.device), *adapters)
        with self._lock:  # a recording has one place for its tokens: two threads must not both find it free
            recorded = self.recorded.get(key)
            if recorded is None:
                recorded = self._record(key, tokens)
            elif not recorded.still_holds(self.decoder):
                self._drop(key, tokens)
                recorded = None
            if recorded is None or recorded.is_waiting():
                return None
            self._replays[key] += 1
            return _Replay.apply(recorded, tokens, *recorded.parameters)

    def _drop(self, key: Any, tokens: Tensor) -> None:
        """Drop a recording that is out of date. Raise if that keeps happening: each step would be recorded anew."""
        del self.recorded[key]
        self._seen[key] = 0
        at_once = self._replays[key] <= 1
        self._changes[key] = self._changes.get(key, 0) + 1 if at_once else 0
        if self._changes[key] >= CHANGES:
            raise RuntimeError(
                f"use_cuda_graphs: what was recorded for {tuple(tokens.shape)} tokens has changed at once, {CHANGES} "
                f"times; do weights move in every step? {WITHOUT}"
            )

    def _record(self, key: Any, tokens: Tensor) -> "_Recorded | None":
        if len(self.recorded) >= self.most or not any(p.requires_grad for p in self.decoder.parameters()):
            return None
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= self.after:
            return None
        watched = who_watches(self.decoder)
        if watched:
            raise ValueError(
                f"use_cuda_graphs: {watched} has hooks, which a replay would not call; remove them. {WITHOUT}"
            )
        states = [state for manager in self.managers for state in manager.states]
        before = [state.clone() for state in states]
        try:
            self.recorded[key] = _made(self.decoder, tokens)
        except Exception as error:
            error.add_note(f"use_cuda_graphs: while a step of {tuple(tokens.shape)} tokens was recorded. {WITHOUT}")
            raise
        finally:
            if states:
                torch._foreach_copy_(states, before)  # recording is no training step
        self._replays[key] = 0
        return self.recorded[key]


def _made(decoder: Any, tokens: Tensor) -> "_Recorded":
    """Record a step, and leave the random numbers as they were, also where recording breaks off."""
    generator = torch.cuda.default_generators[tokens.device.index]
    numbers = generator.get_state()
    complete = False
    try:
        # A graph is of the current device: work on another would be done now, and not again.
        with torch.cuda.device(tokens.device), _no_cached_casts():
            made = _Recorded(decoder, tokens)
        complete = True
        return made
    finally:
        if complete:
            generator.set_state(numbers)
        else:
            _renew(generator, numbers)


def _wants_more(decoder: Any) -> bool:
    """Whether a step asks for more than a graph gives: activations computed again, or all of them returned."""
    config = getattr(decoder, "config", None)
    shown = any(getattr(config, name, False) for name in ("output_hidden_states", "output_attentions"))
    return shown or getattr(decoder, "gradient_checkpointing", False)


def _renew(generator: torch.Generator, numbers: Tensor) -> None:
    """Replace the generator's state: after a recording that broke off, every later random number would be an error."""
    fresh = torch.Generator(generator.device)
    fresh.set_state(numbers)
    generator.graphsafe_set_state(fresh)


@contextmanager
def _no_cached_casts() -> Iterator[None]:
    """Turn off autocast's cache of cast weights: a recording would read the copy, and never the weight again."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Raise where something waits for the GPU. Within a recording it would raise, too, and break more."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _only_tokens(kwargs: dict[str, Any]) -> Tensor | None:
    """The token ids, if a step is given nothing else that matters, and its mask is plainly causal; else None."""
    given = {name: value for name, value in kwargs.items() if name not in _IRRELEVANT}
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    tokens = given.pop("input_ids", None)
    mask = given.pop("attention_mask", None)
    plain = isinstance(mask, Tensor) and mask.numel() == 0  # see `attention.plainly_causal`
    return tokens if isinstance(tokens, Tensor) and not given and plain else None


_IRRELEVANT = ("use_cache", "num_items_in_batch", "shift_labels")  # to layers, in training


class _Recorded:
    """Forward and backward of the decoder for tokens of one shape."""

    def __init__(self, decoder: Any, tokens: Tensor) -> None:
        self.parameters = [p for p in decoder.parameters() if p.requires_grad]
        self.read = list(decoder.parameters())
        self._inputs = [nn.Parameter(p.detach()) for p in self.parameters]
        self._state = state_of(decoder)
        self.tokens = tokens.clone()
        self.pool = torch.cuda.graph_pool_handle()
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self._in_flight: weakref.ref[_InFlight] | None = None
        # Autograd remembers for a Parameter, as long as any graph has it, on which stream its gradient is added up;
        # that other stream cannot take part in a recording. So what is recorded has Parameters of its own, which lie
        # in the same memory.
        with _in_place_of(decoder, self.parameters, self._inputs):
            self._record(decoder)

    def _record(self, decoder: Any) -> None:
        mask = attention.plainly_causal(decoder.get_input_embeddings().weight)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Before: what is compiled is compiled, and libraries want memory of their own for each stream.
            for context in (nullcontext(), _no_waiting()):
                with context:
                    hidden = self._hidden(decoder, mask)
                    self._gradients(hidden, torch.zeros_like(hidden))
                    del hidden
        torch.cuda.current_stream().wait_stream(stream)
        mode = capture_error_mode()
        with torch.cuda.graph(self.forward, pool=self.pool, stream=stream, capture_error_mode=mode):
            hidden = self._hidden(decoder, mask)
        self.gradient = torch.zeros_like(hidden)
        with torch.cuda.graph(self.backward, pool=self.pool, stream=stream, capture_error_mode=mode):
            self.gradients = self._gradients(hidden, self.gradient)
        self.hidden = hidden.detach()

    def _hidden(self, decoder: Any, mask: Tensor) -> Tensor:
        return decoder(input_ids=self.tokens, attention_mask=mask, use_cache=False).last_hidden_state

    def _gradients(self, hidden: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(hidden, self._inputs, gradient, allow_unused=True)

    def still_holds(self, decoder: Any) -> bool:
        """Whether the decoder is as it was recorded: the same Parameters trained, in the same memory and way."""
        return state_of(decoder) == self._state

    def is_waiting(self) -> bool:
        """Whether the backward of the last replayed forward may still come, and needs its activations."""
        return self._in_flight is not None and self._in_flight() is not None

    def begin(self) -> "_InFlight":
        in_flight = _InFlight()
        self._in_flight = weakref.ref(in_flight)
        return in_flight

    def end(self) -> None:
        self._in_flight = None

    def copied_gradients(self) -> list[Tensor | None]:
        """Copies of the gradients: the next step writes over the recording's own, and several may be summed."""
        copies = iter(torch._foreach_mul([g for g in self.gradients if g is not None], 1.0))
        return [None if g is None else next(copies) for g in self.gradients]


@contextmanager
def _in_place_of(module: nn.Module, old: Sequence[nn.Parameter], new: Sequence[nn.Parameter]) -> Iterator[None]:
    """Give modules the new Parameters in the place of the old ones, until the block ends."""
    other = dict(zip(map(id, old), new, strict=True))
    replaced = [
        (parameters, name, p)
        for parameters in (m._parameters for m in module.modules())
        for name, p in parameters.items()
        if id(p) in other
    ]
    try:
        for parameters, name, p in replaced:
            parameters[name] = other[id(p)]
        yield
    finally:
        for parameters, name, p in replaced:
            parameters[name] = p


class _InFlight:
    """A token of a replayed forward whose backward has not run: it lives as long as its autograd graph."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorded: _Recorded, tokens: Tensor, *_parameters: Tensor) -> Tensor:
        recorded.tokens.copy_(tokens)
        recorded.forward.replay()
        ctx.recorded, ctx.in_flight = recorded, recorded.begin()
        ctx.versions = versions_of(recorded.read)
        return recorded.hidden.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        recorded: _Recorded = ctx.recorded
        check_versions(recorded.read, ctx.versions)
        recorded.gradient.copy_(gradient)
        recorded.backward.replay()
        ctx.in_flight = None
        recorded.end()
        return None, None, *recorded.copied_gradients()
