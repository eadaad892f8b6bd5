"""Other libraries, set up as their documentation says: FP8 on every linear of the decoder, the head in BF16."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import nn

_TORCHAO_RECIPES = {"torchao": "tensorwise", "torchao-row": "rowwise"}


def convert_by_torchao(model: nn.Module, kind: str, *, any_length: bool) -> str:
    """Convert in place to torchao's float8 training. Returns one line about it.

    `any_length`: also for numbers of tokens that 16 does not divide, which it then pads.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    recipe = _TORCHAO_RECIPES[kind]
    convert_to_float8_training(
        model,
        config=replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=any_length),
        module_filter_fn=lambda _, name: "lm_head" not in name,
    )
    count = sum(isinstance(module, Float8Linear) for module in model.modules())
    return f"torchao {recipe}: {count} linears in FP8"


def convert_by_te(model: nn.Module) -> tuple[str, AbstractContextManager[Any]]:
    """Replace linears in place by Transformer Engine's, with delayed scaling. Also returns the context of a forward."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    count = 0
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or "lm_head" in name:
            continue
        weight = module.weight
        linear = te.Linear(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            params_dtype=weight.dtype,
            device=weight.device,
        )
        linear.weight = weight
        if module.bias is not None:
            linear.bias = module.bias
        model.set_submodule(name, linear)
        count += 1
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=32, amax_compute_algo="max")
    return f"Transformer Engine delayed: {count} linears in FP8", _TEContext(te, recipe)


class _TEContext:
    """Reusable `te.fp8_autocast`, which by itself can be entered once only."""

    def __init__(self, te: Any, recipe: Any) -> None:
        self._te, self._recipe = te, recipe

    def __enter__(self) -> None:
        self._inner = self._te.fp8_autocast(enabled=True, fp8_recipe=self._recipe)
        self._inner.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._inner.__exit__(*exc)
