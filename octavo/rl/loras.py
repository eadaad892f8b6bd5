"""Adapters of `fast_generate`, as scripts for vLLM name them: none, those of a folder, or the model's as they are.

    model.fast_generate(texts, params)                                             # the model's own, as they are now
    model.fast_generate(texts, params, lora_request=None)                          # none: the base alone
    model.save_lora("adapters")
    model.fast_generate(texts, params, lora_request=model.load_lora("adapters"))   # those of the folder

An engine computes with the adapters of the model. So those of a folder take their place for the length of a call.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.hf.export import save_merged
from octavo.rl.attach import attached, base_of
from octavo.rl.policy import lock_of

LIVE: Any = object()  # the adapters of the model, as they are now
_SCALED_BY = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")


class SavedLora:
    """Adapters of a folder, which may take the place of those of a model."""

    def __init__(self, model: Any, folder: str | Path, load_tensors: bool = True) -> None:  # noqa: ARG002
        """Read the adapters; raise a `ValueError` if they are not of the shape of the model's.

        `load_tensors`: of other libraries' scripts, and without effect.
        """
        from peft import PeftConfig, get_peft_model_state_dict
        from peft.utils.save_and_load import load_peft_weights

        self.folder, self.model, self.adapter = str(folder), model, model.active_adapter
        # PEFT writes an adapter of any other name than `default` into a folder below, of that name.
        place = next(
            (x for x in (Path(folder) / self.adapter, Path(folder)) if (x / "adapter_config.json").is_file()), None
        )
        if place is None:
            raise ValueError(f"load_lora({self.folder!r}): no adapter_config.json there; give a folder of save_lora")
        config: Any = PeftConfig.from_pretrained(str(place))
        own: Any = model.peft_config[self.adapter]
        for name in _SCALED_BY:
            if getattr(config, name, None) != getattr(own, name, None):
                raise self._other(f"{name}={getattr(config, name, None)!r}", repr(getattr(own, name, None)))
        self._values: dict[str, Tensor] = load_peft_weights(str(place), device="cpu")
        # Parameters themselves: a model that is moved gives them other data.
        state = model.state_dict(keep_vars=True)
        self._places: dict[str, Tensor] = get_peft_model_state_dict(model, state, adapter_name=self.adapter)
        for name in {**self._values, **self._places}:
            shapes = [tuple(x[name].shape) if name in x else None for x in (self._values, self._places)]
            if shapes[0] != shapes[1]:
                raise self._other(f"{name} of shape {shapes[0]}", str(shapes[1]))

    def _other(self, theirs: str, mine: str) -> ValueError:
        return ValueError(
            f"load_lora({self.folder!r}): adapters with {theirs}, where those of the model have {mine}; load the model "
            "with adapters of that kind"
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the model compute with these adapters."""
        if self.model.active_adapter != self.adapter:
            raise ValueError(
                f"lora_request: load_lora({self.folder!r}) was for the adapter {self.adapter!r}, and the model "
                f"computes with {self.model.active_adapter!r} now; load it again"
            )
        before = {name: place.detach().clone() for name, place in self._places.items()}
        self._write(self._values)
        try:
            yield
        finally:
            self._write(before)

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, place in self._places.items():
            place.copy_(values[name])


@contextmanager
def adapters_for(model: nn.Module, request: Any) -> Iterator[None]:
    """Have `model` compute with the adapters that a `lora_request` names. Rollouts of other threads wait."""
    lock = lock_of(base_of(model).config)
    if request is LIVE:
        yield
    elif request is None:
        with lock, _without_adapters(model):
            yield
    elif isinstance(request, SavedLora):
        with lock, request.in_place():
            yield
    else:
        raise ValueError(
            f"lora_request={request!r}: None for the base alone, what model.load_lora(folder) returns, or leave it out "
            "for the adapters of the model as they are now"
        )


def _without_adapters(model: nn.Module) -> AbstractContextManager[None]:
    """Have the base compute alone."""
    ups = _ups(model)
    return _disabled(model) if ups is None else _zero(ups)


def _ups(model: nn.Module) -> list[Tensor] | None:
    """The matrices B of all adapters; None where adapters do more than to add s · B · A · x, as DoRA does."""
    found: list[Tensor] = []
    layers: list[Any] = list(model.modules())
    for layer in layers:
        if isinstance(getattr(layer, "disable_adapters", None), bool):
            if not hasattr(layer, "lora_B") or layer.lora_variant or layer.merged or any(layer.lora_bias.values()):
                return None
            found += [matrix.weight for matrix in layer.lora_B.values()]
            found += layer.lora_embedding_B.values()
    return found


@contextmanager
def _zero(ups: Sequence[Tensor]) -> Iterator[None]:
    """Have adapters add zero. Modules, and graphs of them, stay as they are: vLLM cannot record others."""
    before = [up.detach().clone() for up in ups]
    for up in ups:
        up.data.zero_()
    try:
        yield
    finally:
        for up, values in zip(ups, before, strict=True):
            up.data.copy_(values)


@contextmanager
def _disabled(model: nn.Module) -> Iterator[None]:
    """Disable adapters as PEFT's `disable_adapter` does, from the model inside, and enable those that were enabled."""
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    # A flag of PEFT's layers; transformers' models have a method of this name.
    layers: list[Any] = [m for m in model.modules() if getattr(m, "disable_adapters", None) is False]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, requires_grad in trained.items():
            parameter.requires_grad_(requires_grad)


@cache
def give_adapters_methods() -> None:
    """Give models with an engine `save_lora` and `load_lora` when they get adapters, whoever adds them."""
    if find_spec("peft") is None:
        return
    from peft import PeftModel

    original: Any = PeftModel.__init__

    @wraps(original)
    def init(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        original(self, model, *args, **kwargs)
        if attached(self) is not None:
            self.save_lora = partial(save_lora, self)
            self.load_lora = partial(SavedLora, self)

    kind: Any = PeftModel
    kind.__init__ = init


def save_lora(model: Any, path: str | Path) -> None:
    """Write the adapters of a model, as PEFT does."""
    save_merged(model, path, "lora")
