"""The choice of linears to convert: by `skip`, by a filter, and without adapters unless they are named."""

from collections.abc import Callable, Sequence

from torch import nn

from octavo.nn.linear import LinearInFP8
from octavo.nn.names import is_skipped, matches
from octavo.nn.sharded import plain_class
from octavo.nn.styles import style_of
from octavo.numerics import FP8TrainingConfig

_WHOLE_COPIES = ("modules_to_save",)  # PEFT's trained copies of whole layers, as large as those layers

Filter = Callable[[str, nn.Linear], bool]


class Choice:
    """The linears to convert, by everything that a caller can say about it."""

    def __init__(
        self,
        modules: dict[str, nn.Module],
        config: FP8TrainingConfig,
        filter: Filter | None = None,
        include: Sequence[str] = (),
    ) -> None:
        if filter is not None and not callable(filter):
            raise TypeError(f"filter={filter!r}: a function of a linear's name and the linear, True to convert it")
        if isinstance(include, str) or not all(isinstance(pattern, str) for pattern in include):
            raise ValueError(f"include={include!r}: a sequence of names of adapters, such as ('lora_A', 'lora_B')")
        self.modules, self.config, self.filter, self.include = modules, config, filter, tuple(include)
        self.adapters = _adapters(modules)

    def why_not(self, name: str, linear: nn.Linear) -> str:
        """Return why this linear is not converted; empty if it is."""
        if is_skipped(name, self.config):
            return "left alone: config.skip names it"
        if plain_class(linear) is not nn.Linear:
            return f"not nn.Linear itself but a subclass, {type(linear).__name__}"
        if "forward" in linear.__dict__ and style_of(linear) is None:
            return "another forward is in the place of its own, as Accelerate's hooks put it: convert the model before"
        if not linear.weight.is_floating_point() or linear.weight.element_size() not in (2, 4):
            return f"weight of {linear.weight.dtype}"
        if name in self.adapters and not any(matches(name, pattern) for pattern in self.include):
            return "an adapter: FP8 gains nothing at its rank (include=... converts it)"
        if self.filter is not None:
            chosen = self.filter(name, linear)
            if not isinstance(chosen, bool):
                raise TypeError(f"filter returned {chosen!r} for {name!r}: True to convert it, or False")
            return "" if chosen else "left alone: filter says so"
        return ""

    def check_names(self) -> None:
        """Raise if a name in `skip` or `include` matches no module."""
        for pattern in self.config.skip:
            if pattern not in FP8TrainingConfig.skip and not any(matches(name, pattern) for name in self.modules):
                raise ValueError(f"skip={pattern!r}: no module of the model has that name, or matches that pattern")
        for pattern in self.include:
            named = [name for name in self.adapters if matches(name, pattern)]
            if not named:
                raise ValueError(f"include={pattern!r}: no adapter of the model has that name, or matches that pattern")
            for name in named:
                parents = (self.modules[parent] for parent in _parents(name) if parent in self.modules)
                if any(isinstance(getattr(parent, "base_layer", None), LinearInFP8) for parent in parents):
                    raise ValueError(
                        f"include={pattern!r}: the base of {name} is frozen in FP8 and computes its adapters with it, "
                        "in high precision; leave it out"
                    )


def _parents(name: str) -> list[str]:
    path = name.split(".")
    return [".".join(path[:i]) for i in range(len(path))]


def _adapters(modules: dict[str, nn.Module]) -> set[str]:
    """Return the names of modules inside adapters, from PEFT's `adapter_layer_names` and from LoRA's names."""
    inside: list[str] = []
    for name, module in modules.items():
        kinds = getattr(module, "adapter_layer_names", ())
        inside += [f"{name}.{kind}".lstrip(".") for kind in kinds if kind not in _WHOLE_COPIES]
    return {
        name
        for name in modules
        if any(part.startswith("lora_") for part in name.split("."))
        or any(name == prefix or name.startswith(f"{prefix}.") for prefix in inside)
    }
