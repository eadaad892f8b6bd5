"""Names of the weights in products, and which of them `config.skip` leaves in high precision.

The names are those of the model, if it is given: a weight is known by the module that has it now, under which name.
FSDP2 puts another Parameter there, and a third one for the time of a call. Without the model, names are looked up when
a Parameter first comes up in a product: the largest module that holds it among the local variables of the calling
functions (`self`, as a rule) names it and all its other Parameters.
"""

import fnmatch
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from octavo.numerics import FP8TrainingConfig
from octavo.tracing import constant_when_traced


class _Place(NamedTuple):
    """Where the given model has a weight: `name` in full, and the module that has it as `key`."""

    name: str
    module: nn.Module
    key: str

    def holds(self, x: Tensor) -> bool:
        """Return True if `x` is the Parameter that is there now, or a view of it."""
        parameter = self.module._parameters.get(self.key)  # not there while it is parametrised
        return parameter is not None and is_same(x, parameter)


class WeightNames:
    """The names of the weights in products."""

    def __init__(self, config: FP8TrainingConfig, model: nn.Module | None) -> None:
        self._skip = tuple(config.skip)
        self._given = model is not None
        # A tied weight has two names, and either may be skipped.
        self._places = [] if model is None else _places(model)
        self._skipped = [place for place in self._places if self._is_skipped(place.name)]
        # Patterns of the user that no weight has matched so far.
        self._unmatched = {pattern for pattern in config.skip if pattern not in FP8TrainingConfig.skip}
        self._lookups: dict[int, tuple[ReferenceType[Tensor], bool]] = {}  # by id: the Parameter, whether it is skipped
        self._match(place.name for place in self._places)
        if model is not None and self._unmatched:
            raise ValueError(f"skip={self._one_unmatched()!r}: no weight of {type(model).__name__} has that name")

    def is_skipped(self, *operands: Tensor) -> bool:
        """Return True if one of the operands is a weight that stays in high precision, or a view of one."""
        if self._given or not self._skip:
            return any(place.holds(x) for x in operands for place in self._skipped)
        if torch.compiler.is_compiling():
            if any(is_weight(x) for x in operands):
                _refuse_while_compiling(self._skip)
            return False
        return any(self._is_skipped_parameter(_parameter_of(x)) for x in operands)

    def name_of(self, *operands: Tensor) -> str:
        """Return the name of the first operand that is a weight of the given model; empty if none is."""
        return next((place.name for place in self._places if any(place.holds(x) for x in operands)), "")

    def check(self) -> None:
        """Raise if a name in `skip` matched no weight and no model was given, which would have the names."""
        if not self._given and self._unmatched:
            raise ValueError(
                f"skip={self._one_unmatched()!r}: no weight of the modules that ran has that name; "
                "pass fp8_autocast the model (model=...), which has the names"
            )

    def _is_skipped_parameter(self, parameter: Tensor | None) -> bool:
        if parameter is None:
            return False
        lookup = self._lookups.get(id(parameter))
        if lookup is None or lookup[0]() is not parameter:
            self._find(parameter)
        return self._lookups[id(parameter)][1]

    def _find(self, parameter: Tensor) -> None:
        self._lookups[id(parameter)] = (ref(parameter), False)
        owner = max(_modules_holding(parameter), key=_names_in, default=None)
        if owner is not None:
            for name, p in owner.named_parameters(remove_duplicate=False):
                before = self._lookups.get(id(p))
                skipped = before is not None and before[0]() is p and before[1]
                self._lookups[id(p)] = (ref(p), skipped or self._is_skipped(name))
            self._match(name for name, _ in owner.named_parameters(remove_duplicate=False))

    def _is_skipped(self, name: str) -> bool:
        """Match the parameter's name, or that of the module it belongs to, as `convert_to_fp8` does."""
        return any(_matches_weight(name, pattern) for pattern in self._skip)

    def _match(self, names: Iterator[str]) -> None:
        for name in names:
            self._unmatched = {pattern for pattern in self._unmatched if not _matches_weight(name, pattern)}

    def _one_unmatched(self) -> str:
        return min(self._unmatched)


def _places(model: nn.Module) -> list[_Place]:
    modules = model.named_modules(remove_duplicate=False)
    return [
        _Place(f"{prefix}.{key}".lstrip("."), module, key)
        for prefix, module in modules
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]


@constant_when_traced
def _refuse_while_compiling(skip: tuple[str, ...]) -> None:
    raise RuntimeError(
        f"skip={skip!r}: the weights that it names are not known while compiling; "
        "pass fp8_autocast the model (model=...), or a config with skip=()"
    )


def _names_in(module: nn.Module) -> int:
    """Return the number of names a module has for its Parameters. A tied head adds a name, but no Parameter."""
    return sum(1 for _ in module.named_parameters(remove_duplicate=False))


def _modules_holding(parameter: Tensor) -> Iterator[nn.Module]:
    """Yield the modules that hold the Parameter among the local variables of the calling functions."""
    seen: set[int] = set()
    frame: Any = sys._getframe(2)
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if isinstance(value, nn.Module) and id(value) not in seen:
                seen.add(id(value))
                if any(p is parameter for p in value.parameters()):
                    yield value
        frame = frame.f_back


def _parameter_of(x: Tensor) -> Tensor | None:
    return x if isinstance(x, nn.Parameter) else x._base if isinstance(x._base, nn.Parameter) else None


def is_weight(x: Tensor) -> bool:
    """Return True for a Parameter or a view of one."""
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


def is_same(x: Tensor, parameter: Tensor) -> bool:
    """Return True if `x` is this Parameter or a view of it."""
    return x is parameter or x._base is parameter


def is_skipped(name: str, config: FP8TrainingConfig) -> bool:
    """Return True if `config.skip` names this layer or parameter: in full, by a part between dots, or by a pattern."""
    return any(matches(name, pattern) for pattern in config.skip)


def matches(name: str, pattern: str) -> bool:
    """Return True if the pattern is a part of the dotted name, or matches all of it."""
    return pattern in name.split(".") or fnmatch.fnmatch(name, pattern)


def _matches_weight(name: str, pattern: str) -> bool:
    return matches(name, pattern) or matches(name.rpartition(".")[0], pattern)
