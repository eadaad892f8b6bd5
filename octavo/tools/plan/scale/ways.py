"""Ways to train on several GPUs: precision of products, of gathered weights and of reduced gradients.

    ddp     every rank has all weights, and gradients are all-reduced in their own dtype, or by a hook in FP8
    fsdp2   weights are sharded, gathered in BF16 or FP8 twice a step, and gradients reduced to shards, in FP32 or BF16
            (`MixedPrecisionPolicy(reduce_dtype=…)`) or in FP8
    zero3   DeepSpeed: as fsdp2, in BF16 both ways; it has no door for FP8 ones

A frozen base is gathered as it is stored: in FP8, one byte a weight, without anything more. Its adapters are too small
for other ways to matter.
"""

from dataclasses import dataclass, replace

from octavo.numerics.checks import check_choice
from octavo.tools.plan.options import Option
from octavo.tools.shapes import Case
from octavo.training.errors import UserError

STRATEGIES = ("ddp", "fsdp2", "zero3")
REDUCES = ("own", "fp32", "bf16", "fp8")  # own: the dtype of the gradients
RECIPES = {False: ("delayed", "block"), True: ("channel", "block")}  # by whether weights are frozen; the first: default


@dataclass(frozen=True)
class Way:
    """One way. `fp8_gather`: layers' weights are gathered in FP8. `reduce`: precision of gradients on the wire."""

    option: Option
    fp8_gather: bool = False
    reduce: str = "fp32"
    says_reduce: bool = False  # whether the name tells it: not where it is the strategy's own

    def __post_init__(self) -> None:
        check_choice("reduce", self.reduce, REDUCES)
        if self.fp8_gather and self.option.code != "fp8":
            raise ValueError(f"fp8_gather=True: code={self.option.code!r} has no FP8 weights; use code='fp8'")

    @property
    def name(self) -> str:
        parts = [{"hf": "BF16 Hugging Face", "own": "BF16 Octavo"}.get(self.option.code, f"FP8 {self.option.recipe}")]
        parts += ["FP8 gather"] * self.fp8_gather
        parts += [f"{self.reduce.upper()} reduce"] * self.says_reduce
        parts += ["checkpointing"] * (self.option.checkpointing == "layers")
        return ", ".join(parts)

    def with_checkpointing(self, kind: str) -> "Way":
        return replace(self, option=replace(self.option, checkpointing=kind))

    def with_optimizer(self, name: str) -> "Way":
        return replace(self, option=replace(self.option, optimizer=name))


def ways_of(case: Case, strategy: str, recipe: str | None = None) -> list[Way]:
    """Return the ways that are compared: first Hugging Face's BF16, then ever more FP8."""
    if strategy not in STRATEGIES:
        raise UserError(f"--strategy {strategy}: choose one of {', '.join(STRATEGIES)}")
    allowed = RECIPES[case.frozen]
    if recipe is not None and recipe not in allowed:
        kind = "LoRA" if case.frozen else "full fine-tuning"
        raise UserError(f"--recipe {recipe}: for {kind} on several GPUs, choose one of {', '.join(allowed)}")
    fp8 = Option("fp8", recipe or allowed[0], masters=not case.frozen, adapter_bytes=4 if case.frozen else 2)
    hf, own = (Option(code, masters=not case.frozen) for code in ("hf", "own"))
    reduce = {"ddp": "own", "fsdp2": "fp32", "zero3": "bf16"}[strategy]
    plain = [Way(option, reduce=reduce) for option in (hf, own, fp8)]
    if case.frozen or strategy == "zero3":
        return plain
    if strategy == "ddp":
        return [*plain, Way(fp8, reduce="fp8", says_reduce=True)]
    return [
        plain[0],
        plain[1],
        Way(own, reduce="bf16", says_reduce=True),
        plain[2],
        Way(fp8, fp8_gather=True, reduce="fp32"),
        Way(fp8, fp8_gather=True, reduce="bf16", says_reduce=True),
        Way(fp8, fp8_gather=True, reduce="fp8", says_reduce=True),
    ]
