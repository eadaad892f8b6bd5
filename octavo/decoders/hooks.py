"""Modules that somebody watches or changes from outside: they are called as themselves, never as part of a fused piece.

A hook is called by `module(x)` alone, and so is a `forward` that was put in the place of the module's own, as
Accelerate does to bring offloaded weights. Pruning and weight norm rely on hooks, too. A fused piece reads weights
without calling the modules that hold them, so one such module among them has all of them called one by one.
"""

from typing import Any

from torch.nn.modules.module import _has_any_global_hook

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_hooked(*modules: Any) -> bool:
    """Whether calling one of these modules does more than its class says."""
    return bool(_has_any_global_hook()) or any(_has_own(module) for module in modules)


def _has_own(module: Any) -> bool:
    own = module.__dict__
    return "forward" in own or any(own[kind] for kind in HOOKS)
