"""The recipe: which format, granularity, scaling and rounding each operand of a product gets.

A product has three operands: the input `x`, the weight `w`, and in backward the gradient `g` of its output.
`FP8TrainingConfig` is what people write; `Recipe` is what code reads, one `OperandRecipe` per operand, complete.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any, Self

from octavo.numerics.checks import check_choice, check_positive_int, checked_percentile
from octavo.numerics.formats import Format, get_format
from octavo.numerics.quantize import BLOCK, GRANULARITIES, MX_RULES
from octavo.numerics.rounding import ROUNDINGS

OPERANDS = ("x", "w", "g")
ALGORITHMS = ("max", "most_recent", "ema")
SCALINGS = ("delayed", "current")
FAST_ACCUMULATIONS = ("none", "forward", "all")
ACTIVATION_STORAGE = ("bf16", "fp8")
FP8_FORMATS = {
    "HYBRID": ("E4M3", "E4M3", "E5M2"),
    "E4M3": ("E4M3", "E4M3", "E4M3"),
    "E5M2": ("E5M2", "E5M2", "E5M2"),
}
RECIPES: dict[str, dict[str, str]] = {
    "delayed": {},
    "current": {"scaling": "current"},
    "channel": {"granularity": "channel"},
    "block": {"granularity": "block", "fp8_format": "E4M3"},
    "mx": {"granularity": "mx", "fp8_format": "E4M3"},
}


@dataclass(frozen=True)
class OperandRecipe:
    """Recipe of one operand. `margin` is a factor of headroom here; `block` is rows × columns of a scale.

    `columns`: another granularity for the transposed layout, which only the weight's gradient reads.
    """

    format: Format
    granularity: str = "tensor"
    block: tuple[int, int] = (1, BLOCK)
    rounding: str = "nearest"
    margin: float = 1.0
    delayed: bool = False
    percentile: float | None = None
    mx_rule: str = "up"
    columns: str | None = None

    def __post_init__(self) -> None:
        # Normalised, so that equal recipes have equal encodings and hashes.
        object.__setattr__(self, "margin", float(self.margin))
        object.__setattr__(self, "percentile", None if self.percentile is None else float(self.percentile))
        # Not by `encode`, which compiled functions call: Dynamo may take numbers for variables.
        rows, columns = self.block
        percentile = "" if self.percentile is None else self.percentile
        text = (
            f"{self.format.name} {self.granularity} {rows} {columns} {self.rounding} {self.margin} "
            f"{'delayed' if self.delayed else 'current'} {self.mx_rule} {self.columns or '-'} {percentile}"
        )
        object.__setattr__(self, "_text", text)

    _hash = 0  # not computed yet

    def __hash__(self) -> int:
        # Computed once, since kernels look up their plans by recipe in every call. Not by `__init__`, which compiled
        # functions call: torch 2.11 cannot trace the hash of a string.
        if not self._hash:
            object.__setattr__(self, "_hash", hash(self.encode()))
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return OperandRecipe.decode, (self.encode(),)  # hashes of strings differ from process to process

    def encode(self) -> str:
        """Encode the recipe as a string, since custom operators take no dataclasses."""
        text: str = self.__dict__["_text"]
        return text

    @staticmethod
    @cache
    def decode(text: str) -> "OperandRecipe":
        format, granularity, rows, columns, rounding, margin, scaling, mx_rule, wgrad, *percentile = text.split()
        return OperandRecipe(
            get_format(format),
            granularity,
            (int(rows), int(columns)),
            rounding,
            float(margin),
            scaling == "delayed",
            float(percentile[0]) if percentile else None,
            mx_rule,
            None if wgrad == "-" else wgrad,
        )


@dataclass(frozen=True)
class Recipe:
    x: OperandRecipe
    w: OperandRecipe
    g: OperandRecipe

    def __str__(self) -> str:
        return f"{self.x.format}·{self.w.format}→{self.g.format} per {self.x.granularity}"


@dataclass(frozen=True)
class FP8TrainingConfig:
    """Everything about FP8 that a person can choose. Frozen and checked at construction.

    Fields:
        fp8_format: `HYBRID` (E4M3 forward, E5M2 gradients), `E4M3` or `E5M2`, in any case.
        amax_history_len: steps that delayed scaling remembers.
        amax_compute_algo: how the history is read: `max`, `most_recent` or `ema` (0.9 / 0.1).
        margin: an *exponent* of headroom: the scale is 2^margin larger than needed, so values may grow by 2^margin
            before they saturate. One number, or one for each of x, w, g (a sequence, or a dict of those names).
        fp8_dpa: also run `scaled_dot_product_attention` in FP8 (under the autocast; refused on a GPU, where it does not
            pay, unless `emulate`).
        granularity: one scale per `tensor`, `channel` (row), `block` (1×128 for x and g, 128×128 for w) or `mx` (1×32).
        scaling: `delayed` (from earlier steps; per tensor only) or `current` (from the tensor itself). Not given:
            delayed per tensor, current otherwise.
        amax_update_interval: recompute delayed scales every so many steps.
        percentile: take this percentile of |x| for amax (per tensor) instead of the maximum: a percentage from 50 to
            100, such as 99.99, or the same as a share, 0.9999.
        rounding: `nearest` or `stochastic`; one, or one for each of x, w, g.
        skip: layers left in high precision: names, parts of dotted names, or patterns (`model.layers.0.*`).
        fp8_head: also run the LM head of a Hugging Face decoder in FP8 (its loss is computed in chunks either way).
        wgrad: `channel` takes one scale per channel for the weight's gradient under the block recipe, whose own 1×128
            by 1×128 product is slow on Hopper.
        fast_accumulation: where tensor cores may keep only about 14 bits of a running sum: `none`, `forward`, or `all`
            (gradients, too). Measured (docs/LOG.md): over 8,192 tokens it adds 0.2 % to a weight gradient that FP8
            has put off by 6 % already, over 32,768 tokens 0.4 %; steps are 2 to 4 % faster.
        activations: what backward reads of a gated MLP, beside what is in FP8 anyway: `bf16`, gate and up as they were;
            `fp8`, both in E4M3 with a scale for every 128 features of a token, which is half of it. Forward sees them
            as they were, either way.
        mx_rule: how MX scales round: `up` (nothing saturates) or `floor` (the OCP specification).
        emulate: True computes by the spec in plain PyTorch; False insists on FP8 tensor cores; not given: whichever
            the device can do.
    """

    fp8_format: str = "HYBRID"
    amax_history_len: int = 32
    amax_compute_algo: str = "max"
    margin: float | Sequence[float] | Mapping[str, float] = 0
    fp8_dpa: bool = False
    granularity: str = "tensor"
    scaling: str | None = None
    amax_update_interval: int = 1
    percentile: float | None = None
    rounding: str | Sequence[str] | Mapping[str, str] = "nearest"
    skip: Sequence[str] = ("lm_head",)
    mx_rule: str = "up"
    fp8_head: bool = False
    wgrad: str | None = None
    fast_accumulation: str = "all"
    activations: str = "bf16"
    emulate: bool | None = None

    def __post_init__(self) -> None:
        # Normalising here, and nowhere else, is what makes two equal configurations compare equal.
        def set_field(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        set_field("fp8_format", str(self.fp8_format).upper())
        check_choice("fp8_format", self.fp8_format, tuple(FP8_FORMATS))
        check_choice("amax_compute_algo", self.amax_compute_algo, ALGORITHMS)
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_choice("mx_rule", self.mx_rule, MX_RULES)
        if self.scaling is None:
            set_field("scaling", "delayed" if self.granularity == "tensor" else "current")
        check_choice("scaling", self.scaling, SCALINGS)
        if self.scaling == "delayed" and self.granularity != "tensor":
            raise ValueError(
                f"scaling='delayed' with granularity={self.granularity!r}: delayed scaling is per tensor; "
                "use scaling='current' or granularity='tensor'"
            )
        for name in ("amax_history_len", "amax_update_interval"):
            check_positive_int(name, getattr(self, name))
        set_field("margin", _per_operand("margin", self.margin, _check_margin))
        set_field("rounding", _per_operand("rounding", self.rounding, _check_rounding))
        if self.percentile is not None:
            set_field("percentile", checked_percentile("percentile", self.percentile))
            if self.granularity != "tensor":
                raise ValueError(f"percentile={self.percentile!r}: only with granularity='tensor'")
        names = isinstance(self.skip, Sequence) and not isinstance(self.skip, str)
        if not names or not all(isinstance(name, str) for name in self.skip):
            raise ValueError(f"skip={self.skip!r}: a sequence of layer names, such as ('lm_head',)")
        set_field("skip", tuple(self.skip))
        check_choice("fast_accumulation", self.fast_accumulation, FAST_ACCUMULATIONS)
        check_choice("activations", self.activations, ACTIVATION_STORAGE)
        if self.wgrad not in (None, "channel"):
            raise ValueError(f"wgrad={self.wgrad!r}: choose 'channel', or None for the recipe's own granularity")
        if self.wgrad is not None and self.granularity != "block":
            raise ValueError(f"wgrad={self.wgrad!r}: only with granularity='block', not {self.granularity!r}")
        for name in ("fp8_dpa", "fp8_head", "emulate"):
            if getattr(self, name) not in ((True, False, None) if name == "emulate" else (True, False)):
                raise ValueError(f"{name}={getattr(self, name)!r}: choose True or False")
        set_field("_recipe", Recipe(*map(self._recipe_of, range(len(OPERANDS)))))

    @classmethod
    def from_recipe(cls, name: str, **overrides: Any) -> Self:
        """Return a named recipe: `delayed` (the default), `current`, `channel`, `block` or `mx`, with overrides."""
        name = str(name).lower()
        check_choice("recipe", name, tuple(RECIPES))
        return cls(**{**RECIPES[name], **overrides})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            choices = ", ".join(sorted(known))
            raise ValueError(f"{unknown[0]}={values[unknown[0]]!r}: no such field; choose from {choices}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def replace(self, **changes: Any) -> Self:
        if "granularity" in changes and "scaling" not in changes:
            changes["scaling"] = None  # follow the granularity again
        return replace(self, **changes)

    @property
    def recipe(self) -> Recipe:
        """Recipes of the three operands, as the layers read them."""
        recipe: Recipe = self.__dict__["_recipe"]
        return recipe

    def _recipe_of(self, i: int) -> OperandRecipe:
        recipe = OperandRecipe(
            format=get_format(FP8_FORMATS[self.fp8_format][i]),
            granularity=self.granularity,
            block=(BLOCK, BLOCK) if OPERANDS[i] == "w" else (1, BLOCK),
            rounding=_pick(self.rounding, i),
            margin=2.0 ** _pick(self.margin, i),
            delayed=self.scaling == "delayed",
            percentile=self.percentile,
            mx_rule=self.mx_rule,
            columns=None if OPERANDS[i] == "w" else self.wgrad,
        )
        # One object for equal recipes: caches that layers ask in every call then find it by identity.
        return OperandRecipe.decode(recipe.encode())


def check_config(config: FP8TrainingConfig | str | None) -> FP8TrainingConfig:
    """Return the configuration a caller gave: an object, the name of a recipe, or None for the default."""
    if isinstance(config, str):
        if config.lower() not in RECIPES:
            raise ValueError(
                f"config={config!r}: an FP8TrainingConfig, or the name of a recipe: {', '.join(RECIPES)}; a format "
                "goes into FP8TrainingConfig(fp8_format=...)"
            )
        return FP8TrainingConfig.from_recipe(config)
    if config is not None and not isinstance(config, FP8TrainingConfig):
        raise TypeError(f"config={config!r}: an FP8TrainingConfig, such as FP8TrainingConfig(fp8_format='E4M3')")
    return config or FP8TrainingConfig()


def _pick(value: Any, i: int) -> Any:
    return value[i] if isinstance(value, tuple) else value


def _per_operand(field: str, value: Any, check: Any) -> Any:
    """Return three values, in the order x, w, g, from one value or three."""
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - set(OPERANDS))
        if unknown:
            raise ValueError(f"{field}={value!r}: operands are x, w and g, not {unknown[0]!r}")
        value = tuple(value.get(name, "nearest" if field == "rounding" else 0) for name in OPERANDS)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != len(OPERANDS):
            raise ValueError(f"{field}={value!r}: one value, or three for x, w and g")
        value = tuple(value)
    for single in value if isinstance(value, tuple) else (value,):
        check(field, single)
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


def _check_margin(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -16 <= value <= 16:
        raise ValueError(f"{field}={value!r}: an exponent of headroom from -16 to 16 (values may grow by 2**margin)")


def _check_rounding(field: str, value: Any) -> None:
    check_choice(field, value, ROUNDINGS)
