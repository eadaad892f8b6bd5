"""Regional compilation: the repeated layers of a model, each compiled by `torch.compile`, and the rest as it is.

Layers of one class share the compiled code, so a deep model compiles in the time of one layer. Sizes that change are
dynamic: the second length that comes compiles once more, for all lengths.
"""

from typing import Any

from torch import nn

BACKEND = "inductor"
_COMPILED = "_compiled_call_impl"  # torch's own name, in a module that was compiled in place
_CACHE = "_octavo_use_cache"  # in a model whose configuration had it on


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists that hold two or more layers with linears, all of one class."""
    layers: list[nn.Module] = []
    todo = [model]
    while todo:
        module = todo.pop(0)
        members = list(module.children())
        if isinstance(module, nn.ModuleList) and _are_layers(members):
            layers += members
        else:
            todo += members
    return layers


def _are_layers(members: list[nn.Module]) -> bool:
    one_class = len(members) > 1 and len({type(member) for member in members}) == 1
    return one_class and any(isinstance(module, nn.Linear) for module in members[0].modules())


def compile_layers(model: nn.Module) -> int:
    """Compile the repeated layers of a model in place. Returns how many there are.

    A cache of keys and values, which decoders of transformers fill by default while they train, too, would make each
    layer another program. So `config.use_cache` is turned off.
    """
    layers = repeated_layers(model)
    if not layers:
        raise ValueError(
            f"compile='layers': {type(model).__name__} has no nn.ModuleList of two or more layers of one class with "
            "linears; leave it out, or call torch.compile(model)"
        )
    for layer in layers:
        layer.compile(backend=BACKEND)
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        model.__dict__[_CACHE] = True
        config.use_cache = False
    return len(layers)


def undo_compile(module: nn.Module) -> None:
    """Undo `compile_layers` for one module: a compiled layer, or the model."""
    if module.__dict__.get(_COMPILED) is not None:
        module._compiled_call_impl = None
    if module.__dict__.pop(_CACHE, False):
        config: Any = module.config
        config.use_cache = True
