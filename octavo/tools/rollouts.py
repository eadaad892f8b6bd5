"""Sizes of a rollout, for `octavo bench` and `octavo plan`: completions, their prompts, and their cache."""

from dataclasses import asdict, dataclass
from typing import Any

from octavo.numerics.checks import check_positive_int
from octavo.tools.shapes import Case
from octavo.training.errors import UserError

BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Size:
    """A rollout: `slots` completions of `new_tokens` tokens, `group` of them for each prompt of `prompt` tokens."""

    slots: int = 64
    prompt: int = 128
    new_tokens: int = 512
    group: int = 8

    def __post_init__(self) -> None:
        for name in ("slots", "prompt", "new_tokens", "group"):
            check_positive_int(name, getattr(self, name))
        if self.slots % self.group:
            raise ValueError(f"group={self.group}: completions of a prompt, so a divisor of slots={self.slots}")

    @property
    def prompts(self) -> int:
        return self.slots // self.group

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return self.slots * self.new_tokens

    @property
    def length(self) -> int:
        return self.prompt + self.new_tokens

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_positions(model: str, size: Size, positions: Any) -> None:
    """Refuse sequences that are longer than the model has positions, if its configuration says how many."""
    if isinstance(positions, int) and size.length > positions:
        raise UserError(
            f"--prompt {size.prompt} --new-tokens {size.new_tokens}: {model} has {positions} positions for both "
            "together; give less of one of them"
        )


def kv_bytes(case: Case, *, fp8: bool) -> int:
    """Return the bytes of a token in the cache, over all layers."""
    heads = case.config.get("num_key_value_heads") or case.config["num_attention_heads"]
    one = case.head_dim + FP32 if fp8 else case.head_dim * BF16
    return 2 * case.layers * int(heads) * one
