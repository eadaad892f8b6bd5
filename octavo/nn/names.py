"""Which weight is it? Names of Parameters, and those that `config.skip` leaves in high precision.

With the model given, the names are its own. Without it, they are looked for when a product first meets a Parameter: the
largest module among the local variables of the calling functions that holds it (`self`, as a rule) names it and all its
other Parameters.
"""

import fnmatch
import sys
from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from octavo.numerics import FP8TrainingConfig


class WeightNames:
    """The names of the weights that products meet. `skipped`: those of the given model that stay out."""

    def __init__(self, config: FP8TrainingConfig, model: nn.Module | None) -> None:
        self._skip = tuple(config.skip)
        self._given = model is not None
        # A tied weight has two names, and either may be skipped.
        self.parameters = list(model.named_parameters(remove_duplicate=False)) if model is not None else []
        self.skipped = [p for name, p in self.parameters if self._is_skipped(name)]
        # Names the user wrote that no weight has had so far.
        self._unmatched = {pattern for pattern in config.skip if pattern not in FP8TrainingConfig.skip}
        self._found: dict[int, tuple[ReferenceType[Tensor], bool]] = {}  # by id: the Parameter, whether it stays out
        self._match(name for name, _ in self.parameters)
        if model is not None and self._unmatched:
            raise ValueError(f"skip={self._one_unmatched()!r}: no weight of {type(model).__name__} has that name")

    def is_skipped(self, *operands: Tensor) -> bool:
        """Whether one of the operands is a weight that stays in high precision, or a view of one."""
        if self._given or not self._skip:
            return any(is_same(x, parameter) for x in operands for parameter in self.skipped)
        if torch.compiler.is_compiling():
            if any(is_weight(x) for x in operands):
                _refuse_while_compiling(self._skip)
            return False
        return any(self._is_found_skipped(_parameter_of(x)) for x in operands)

    def name_of(self, *operands: Tensor) -> str:
        """The name of the first of them that is a weight of the given model; empty if none is."""
        return next((name for name, p in self.parameters if any(is_same(x, p) for x in operands)), "")

    def check(self) -> None:
        """Raise if the user names a weight that did not come up: without the model, it may be one that did."""
        if not self._given and self._unmatched:
            raise ValueError(
                f"skip={self._one_unmatched()!r}: no weight of the modules that ran has that name; "
                "pass fp8_autocast the model (model=...), which has the names"
            )

    def _is_found_skipped(self, parameter: Tensor | None) -> bool:
        if parameter is None:
            return False
        found = self._found.get(id(parameter))
        if found is None or found[0]() is not parameter:
            self._find(parameter)
        return self._found[id(parameter)][1]

    def _find(self, parameter: Tensor) -> None:
        self._found[id(parameter)] = (ref(parameter), False)
        owner = max(_modules_holding(parameter), key=_names_in, default=None)
        if owner is not None:
            for name, p in owner.named_parameters(remove_duplicate=False):
                before = self._found.get(id(p))
                skipped = before is not None and before[0]() is p and before[1]
                self._found[id(p)] = (ref(p), skipped or self._is_skipped(name))
            self._match(name for name, _ in owner.named_parameters(remove_duplicate=False))

    def _is_skipped(self, name: str) -> bool:
        """Match the parameter's name, or that of the module it belongs to, as `convert_to_fp8` does."""
        return any(_matches_weight(name, pattern) for pattern in self._skip)

    def _match(self, names: Iterator[str]) -> None:
        for name in names:
            self._unmatched = {pattern for pattern in self._unmatched if not _matches_weight(name, pattern)}

    def _one_unmatched(self) -> str:
        return min(self._unmatched)


def _refuse_while_compiling(skip: tuple[str, ...]) -> None:
    raise RuntimeError(
        f"skip={skip!r}: the weights that it names are not known while compiling; "
        "pass fp8_autocast the model (model=...), or a config with skip=()"
    )


# As `torch.compiler.assume_constant_result` does, but without importing Dynamo: it is called when traced.
_refuse_while_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _names_in(module: nn.Module) -> int:
    """How many names a module has for its Parameters: a head tied to the embedding adds one, and no Parameter."""
    return sum(1 for _ in module.named_parameters(remove_duplicate=False))


def _modules_holding(parameter: Tensor) -> Iterator[nn.Module]:
    """Modules among the local variables of the functions that led here."""
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
    """A Parameter or a view of one."""
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


def is_same(x: Tensor, parameter: Tensor) -> bool:
    """Whether `x` is this Parameter or a view of it."""
    return x is parameter or x._base is parameter


def is_skipped(name: str, config: FP8TrainingConfig) -> bool:
    """Whether `config.skip` names this layer or parameter: its name, a part of its dotted name, or by a pattern."""
    return any(matches(name, pattern) for pattern in config.skip)


def matches(name: str, pattern: str) -> bool:
    return pattern in name.split(".") or fnmatch.fnmatch(name, pattern)


def _matches_weight(name: str, pattern: str) -> bool:
    return matches(name, pattern) or matches(name.rpartition(".")[0], pattern)
