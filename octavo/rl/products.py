"""Products of a base frozen in FP8, while adapters beside it are trained.

    fp8            y and dx are FP8 products
    weights-only   neither is: the weight is dequantised for both. Rollout and trainer agree as they do in BF16
    fp8-dgrad      y as with weights-only, dx an FP8 product: log-probabilities of weights-only at less time

An engine rolls out with weights-only products, unless it is told otherwise. Log-probabilities of a trainer that rounds
activations to FP8 are further from them: by three to four times as much, measured on SmolLM2-135M.
"""

from torch import nn

from octavo.decoders import choice
from octavo.nn.frozen import FP8FrozenLinear
from octavo.numerics.checks import check_choice

PRODUCTS: dict[str, bool | str] = {"fp8": True, "weights-only": False, "fp8-dgrad": choice.DGRAD}


def set_products(model: nn.Module, products: str) -> int:
    """Set how the linears of a model that are frozen in FP8 multiply; return how many there are."""
    check_choice("products", products, tuple(PRODUCTS))
    frozen = [module for module in model.modules() if isinstance(module, FP8FrozenLinear)]
    choice.set_products(frozen, PRODUCTS[products])
    return len(frozen)
