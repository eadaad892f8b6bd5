"""Who generates: other libraries in BF16, and Octavo's engine, in BF16 or on weights in FP8.

| name | |
| --- | --- |
| `generate` | transformers' `generate` in BF16, without adapters |
| `generate_batch` | transformers' continuous batching in BF16, without adapters |
| `bf16` | Octavo's engine on BF16 weights and LoRA |
| `channel`, `block` | Octavo's engine on FP8 weights and LoRA; more words after `+`: |
| `+fp8-kv` | keys and values in FP8 |
| `+fp8-products` | FP8 activations while it decodes, too |
| `+weights-only`, `+fp8-dgrad` | of `--mode grpo`: products of training (`rl/products.py`); else FP8 |

Transformers' two have no adapters, which favours them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.numerics.checks import check_choice
from octavo.training.errors import UserError

OTHERS = ("generate", "generate_batch")
OWN = "bf16"
AGAINST = (*OTHERS, OWN)
RECIPES = ("channel", "block")
EXTRAS = ("fp8-kv", "fp8-products")
TRAINING = ("weights-only", "fp8-dgrad")
DEFAULT_RECIPES = {"rollout": "channel,channel+fp8-kv", "grpo": "channel,channel+weights-only,channel+fp8-dgrad"}


@dataclass(frozen=True)
class Way:
    """One way to generate, and in `--mode grpo` to train. `recipe`: granularity of FP8 weights; None for BF16.

    `products`: of the engine, as `NativeEngine` has them. `training`: of the trainer, as `rl/products.py` has them.
    """

    name: str
    kind: str = "native"
    recipe: str | None = None
    fp8_kv: bool = False
    products: str = "weights"
    training: str = "fp8"

    @property
    def is_native(self) -> bool:
        return self.kind == "native"

    @property
    def fp8_products(self) -> bool:
        """Whether FP8 products decode."""
        return self.recipe is not None and self.products == "fp8"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_ways(mode: str, recipes: Sequence[str], against: Sequence[str]) -> list[Way]:
    """Return the ways that a user names, baselines first."""
    for name in against:
        check_choice("against", name, AGAINST if mode == "rollout" else (OWN,))
    ways = [Way(name, "native" if name == OWN else name) for name in against]
    ways += [_own(mode, item) for item in recipes]
    if not ways:
        raise UserError("nothing to run: give --recipe, --against, or both")
    names = [way.name for way in ways]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"--recipe {twice[0]}: is there twice; name it once")
    return ways


def _own(mode: str, item: str) -> Way:
    recipe, *extras = item.split("+")
    check_choice("recipe", recipe, RECIPES)
    for extra in extras:
        check_choice(f"recipe {recipe}+", extra, EXTRAS + (TRAINING if mode == "grpo" else ()))
    training = [extra for extra in extras if extra in TRAINING]
    if len(training) > 1:
        raise UserError(f"--recipe {item}: {' and '.join(training)} are two products of training; give one")
    return Way(
        item,
        recipe=recipe,
        fp8_kv="fp8-kv" in extras,
        products="fp8" if "fp8-products" in extras else "weights",
        training=training[0] if training else "fp8",
    )
