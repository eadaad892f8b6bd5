"""Functions that Dynamo calls while it traces a model, instead of tracing them.

Such a function may read what Dynamo does not know (a context variable), and what it raises reaches the user: an error
of traced code makes Dynamo run that code uncompiled, and compile what follows.
"""

from collections.abc import Callable
from typing import Any

import torch


def constant_when_traced(function: Callable[..., Any]) -> Any:
    """Do as `torch.compiler.assume_constant_result`, which imports Dynamo: 2 of 5 s of `import octavo`."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_traced
def refuse_transforms() -> None:
    """Raise if the traced code is within a transform of `torch.func`, under which a weight requires no gradient."""
    if torch._C._functorch.maybe_current_level() is not None:
        raise RuntimeError("FP8 products know no transforms of torch.func: use loss.backward() or torch.autograd.grad")
