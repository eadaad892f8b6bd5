"""Rewards of completions, by functions that somebody else wrote.

A reward function is called as TRL calls it, with what its signature names:

    def f(prompts, completions, completion_ids, **columns) -> a number, or None, for each completion

None means that the function has nothing to say about a completion; its reward is the weighted sum of what the others
say. A completion about which none of them says anything, or one of them says NaN or infinity, has no reward: it is
left out of its group, and counted. Whatever else a function does wrong is an error that names it.
"""

import inspect
import math
import reprlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.training.errors import RunError

RewardFunction = Callable[..., Any]
ARGUMENTS = ("prompts", "completions", "completion_ids")  # what a function can ask for besides columns
_HINT = "mend it, then continue with --resume"


@dataclass(frozen=True)
class Scores:
    """Rewards of completions. `rewards[C]`, FP64: NaN where there is none. `means`: of each function, by its name."""

    rewards: Tensor
    means: dict[str, float | None]
    unscored: int


class Rewards:
    """Reward functions and their weights."""

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float] | None = None) -> None:
        if not isinstance(functions, list | tuple) or not all(callable(function) for function in functions):
            raise ValueError(f"rewards={reprlib.repr(functions)}: a list of functions")
        for function in functions:
            if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
                raise ValueError(
                    f"reward function {name_of(function)} is async, and is called without awaiting it: define it with "
                    "def, and run what is async in it by asyncio.run"
                )
        if not functions:
            raise ValueError("rewards: no function is given; GRPO needs at least one")
        if weights is not None and not isinstance(weights, list | tuple):
            raise ValueError(f"weights={weights!r}: a list, with a number for each reward function")
        weights = [1.0] * len(functions) if weights is None else list(weights)
        if len(weights) != len(functions):
            raise ValueError(f"weights: {len(weights)} of them, for {len(functions)} reward functions; give one each")
        if not all(isinstance(weight, int | float) and math.isfinite(weight) for weight in weights):
            raise ValueError(f"weights={weights!r}: finite numbers, one for each reward function")
        self.functions, self.weights = list(functions), weights
        names = [name_of(function) for function in functions]
        self.names = [n if names.count(n) == 1 else f"{n} {names[: i + 1].count(n)}" for i, n in enumerate(names)]

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Scores:
        """Score completions; all arguments have an entry for each of them."""
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        count = len(completions)
        values = torch.tensor(
            [self._values(function, given, count) for function in self.functions], dtype=torch.float64
        ).reshape(len(self.functions), count)
        said = ~values.isnan()
        weights = torch.tensor(self.weights, dtype=torch.float64)[:, None]
        rewards = (values.where(said, 0.0) * weights).sum(dim=0)
        is_scored = said.any(dim=0) & values.where(said, 0.0).isfinite().all(dim=0)
        if count and not is_scored.any():
            raise RunError(
                f"no completion has a reward: {', '.join(self.names)} gave None or NaN for all {count}; {_HINT}"
            )
        means = {
            name: float(row[row.isfinite()].mean()) if row.isfinite().any() else None
            for name, row in zip(self.names, values, strict=True)
        }
        return Scores(rewards.where(is_scored, math.nan), means, int((~is_scored).sum()))

    def _values(self, function: RewardFunction, given: dict[str, Any], count: int) -> list[float]:
        """Return what a function says; None becomes NaN, and NaN becomes infinity, which is no reward either."""
        name = name_of(function)
        try:
            with torch.enable_grad():  # afterwards gradients are as they were, whatever the function sets
                values = function(**_own(_accepted(function, given)))
                values = list(values) if isinstance(values, Iterator) else values  # which computes only now
        except RunError:
            raise
        except (Exception, SystemExit) as error:  # it is not ours: it ends the run, and says where it comes from
            raise RunError(f"reward function {name} raised {_said(error)}; {_HINT}") from error
        try:
            if isinstance(values, str | bytes | Mapping | Set):  # these can be listed, too, and would be something else
                raise TypeError
            values = list(values)
        except TypeError as error:
            shown = reprlib.repr(values)
            raise RunError(
                f"reward function {name} returned {shown}: a list with a number for each completion; {_HINT}"
            ) from error
        if len(values) != count:
            raise RunError(f"reward function {name} returned {len(values)} rewards for {count} completions; {_HINT}")
        return [_number(name, value) for value in values]


def name_of(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _number(name: str, value: Any) -> float:
    if value is None:
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RunError(
            f"reward function {name} gave {reprlib.repr(value)} for a completion: a number, or None for no opinion; "
            f"{_HINT}"
        ) from error
    return number if math.isfinite(number) else math.inf


def _accepted(function: RewardFunction, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function names, or all if it takes any; raise for one that there is not."""
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variable and name not in given:
            raise RunError(
                f"reward function {name_of(function)} asks for {name!r}; there are {', '.join(given)}: give the rows "
                f"such a column, or the argument a default; {_HINT}"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _own(value: Any) -> Any:
    """Return copies of lists and dictionaries, and of those in them; anything else as it is.

    Completions of one prompt share its row, and rows and tokens are used again after a function has had them.
    """
    if type(value) is dict:
        return {name: _own(each) for name, each in value.items()}
    if type(value) is list:
        return [_own(each) if isinstance(each, dict | list) else each for each in value]
    return value


def _said(error: BaseException) -> str:
    """Return the error in a line, with the place that it comes from."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error).splitlines()
    return f"{type(error).__name__}: {message[0] if message else ''} ({Path(frame.filename).name}:{frame.lineno})"
