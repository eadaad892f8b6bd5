"""Weights that an engine brings when a module is called: FSDP2 those of a unit, DeepSpeed's ZeRO-3 those of any module.

A fused piece reads the weights of modules that it does not call. Where an engine has put its hooks on such a module,
nobody would gather its weights, wait for its gradients, or free it afterwards. So the module is called after all, with
the fused computation in the place of its forward:

    around([q, k, v], product, x)      q's hooks( k's hooks( v's hooks( product(x) ) ) )

All weights are there while it computes. Each engine sees one call of each of its modules, with x and the result: on
those it hangs what gathers the weights again in backward, and what reduces gradients. Without such hooks, it is
`product(x)`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from octavo.decoders.classes import INSTEAD, is_fused, take_class
from octavo.decoders.hooks import brings_weights

Result = TypeVar("Result")


def around(modules: Iterable[Any], compute: Callable[[Tensor], Result], x: Tensor) -> Result:
    """Compute `compute(x)` within the calls of those modules whose weights an engine brings; the first is outermost.

    `compute` has to read the weights when it is called, and to use the tensor that it is given.
    """
    for module in reversed([module for module in modules if brings_weights(module)]):
        compute = partial(_within, module, compute)
    return compute(x)


def _within(module: Any, compute: Callable[[Tensor], Result], x: Tensor) -> Result:
    if not is_fused(module):
        take_class(module, _as_it_was)
    result: Result = module(x, **{INSTEAD: compute})
    return result


def _as_it_was(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(self, *args, **kwargs)
