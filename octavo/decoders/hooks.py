"""Modules that somebody watches or changes from outside: they are called as themselves, never as part of a fused piece.

A hook is called by `module(x)` alone, and so is a `forward` that was put in the place of the module's own, as
Accelerate does to bring offloaded weights. Pruning and weight norm rely on hooks, too. A fused piece reads weights
without calling the modules that hold them, so one such module among them has all of them called one by one.

Hooks of an engine that shards weights are another matter: they bring the weights of a module when it is called, and
take them away afterwards. Around those a fused piece computes as it does elsewhere (`gathering.py`).
"""

from typing import Any

from torch.nn.modules.module import _has_any_global_hook

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


_ENGINES = ("torch.distributed.fsdp.", "torch.distributed._composable.", "deepspeed.")
CAPTURING = "transformers.utils.output_capturing."  # hooks that stay for good where hidden states were asked for once


def is_hooked(*modules: Any, beside: tuple[str, ...] = ()) -> bool:
    """Whether calling one of these modules does more than its class says, and than bringing its weights.

    `beside`: packages whose hooks do not count.
    """
    return bool(_has_any_global_hook()) or any(_has_own(module, (*_ENGINES, *beside)) for module in modules)


def _has_own(module: Any, beside: tuple[str, ...]) -> bool:
    own = module.__dict__
    hooks = [hook for kind in HOOKS for hook in own[kind].values()]
    return "forward" in own or any(not f"{_origin(hook)}.".startswith(beside) for hook in hooks)


def brings_weights(module: Any) -> bool:
    """Whether an engine brings the weights of this module when it is called."""
    hooks = module.__dict__["_forward_pre_hooks"]
    return bool(hooks) and any(map(_is_of_engine, hooks.values()))


def _is_of_engine(hook: Any) -> bool:
    return f"{_origin(hook)}.".startswith(_ENGINES)


_LEVELS = 5  # the decoder; its embedding and its list of layers; the layers; their parts; the linears
# Hooks from these packages bring weights, or outputs that were asked for: they do not depend on a batch's layout.
_BLIND = (
    CAPTURING,
    "transformers.modeling_utils.",
    "transformers.distributed.",
    "torch.distributed.",
    "accelerate.",
    "deepspeed.",
    "octavo.",
)


def changes_calls(module: Any) -> bool:
    """Whether calling a model computes something else than its parts do: by hooks, or by a forward in its own's place.

    Forwards of trainers are not meant, which compute a loss or cast: they change no token.
    """
    own = module.__dict__
    hooks = [hook for kind in ("_forward_hooks", "_forward_pre_hooks") for hook in own[kind].values()]
    if any(not f"{_origin(hook)}.".startswith(_BLIND) for hook in hooks):
        return True
    trainers = ("trl.", "peft.", "transformers.", "torch.", *_BLIND)
    return "forward" in own and not f"{_origin_of_forward(own['forward'])}.".startswith(trainers)


def is_watched(decoder: Any) -> str:
    """The first module of a decoder with a hook that may look at hidden states, by its class; empty if there is none.

    A forward that was replaced may, too. Looks at the decoder, its layers, their parts and the linears in those:
    nothing further inside sees hidden states.
    """
    if _has_any_global_hook():
        return "torch.nn.modules.module"
    level = [decoder]
    for _ in range(_LEVELS):
        for module in level:
            if _sees(module):
                return type(module).__name__
        level = [child for module in level for child in module._modules.values() if child is not None]
    return ""


def _sees(module: Any) -> bool:
    own = module.__dict__
    origins = [_origin(hook) for kind in HOOKS if own[kind] for hook in own[kind].values()]
    if "forward" in own:
        origins.append(_origin_of_forward(own["forward"]))
    return any(not f"{origin}.".startswith(_BLIND) for origin in origins)


def _origin_of_forward(forward: Any) -> str:
    """The package of a function that was put in the place of a forward; `__module__` is that of what it wraps."""
    function = getattr(forward, "func", forward)
    function = getattr(function, "__func__", function)
    return str(getattr(function, "__globals__", {}).get("__name__", type(function).__module__))


def _origin(hook: Any) -> str:
    """The package of a hook; of the function within, for a partial."""
    return str(getattr(getattr(hook, "func", hook), "__module__", ""))
