"""The ways to train that a plan compares."""

from dataclasses import dataclass, replace

from octavo.numerics.checks import check_choice
from octavo.numerics.quantize import BLOCK
from octavo.optim import OPTIMIZERS
from octavo.tools.bench.cases import Case

CODES = ("hf", "own", "fp8")
RECIPES = ("delayed", "channel", "block")
CHECKPOINTING = ("none", "layers", "offload")
BY_EXACTNESS = ("adamw", "adamw8bit", "adamwfp8", "adamw4bit")  # of the optimiser's states


@dataclass(frozen=True)
class Option:
    """One way to train a model.

    `code`: Hugging Face's own in BF16, Octavo's fused pieces in BF16, or those in FP8. `recipe`: what has a scale in
    FP8 (`delayed`: a tensor). `optimizer`: None for forward and backward alone. `checkpointing`: `layers` keeps the
    input of each layer, `offload` keeps that in host memory. `activations`: what trained FP8 layers keep, as in
    `FP8TrainingConfig`. `in_backward`: gradients are applied there, one by one. `adapter_bytes`: beside FP8, PEFT makes
    adapters in FP32. `joined_norms`: where `hf/layer.py` joins norms to what follows them.
    """

    code: str
    recipe: str | None = None
    optimizer: str | None = "adamw"
    checkpointing: str = "none"
    compiled: bool = True
    fp8_head: bool = False
    activations: str = "bf16"
    in_backward: bool = False
    weight_bytes: int = 2  # of a weight that is trained, or is not in FP8
    adapter_bytes: int = 2
    joined_norms: bool = True

    def __post_init__(self) -> None:
        check_choice("code", self.code, CODES)
        check_choice("checkpointing", self.checkpointing, CHECKPOINTING)
        if self.optimizer is not None:
            check_choice("optimizer", self.optimizer, OPTIMIZERS)
        if self.code == "fp8":
            check_choice("recipe", self.recipe, RECIPES)
        elif self.recipe is not None or self.fp8_head or self.activations != "bf16":
            raise ValueError(f"code={self.code!r} has no FP8: leave recipe, fp8_head and activations out")

    @property
    def name(self) -> str:
        fp8 = "FP8 activations" if self.activations == "fp8" else f"FP8 {self.recipe}"
        who = {"hf": "BF16 Hugging Face", "own": "BF16 Octavo", "fp8": fp8}[self.code]
        weights = ", FP32 weights" if self.weight_bytes == 4 else ""
        return f"{who}{weights}, {self.optimizer}{' in backward' if self.in_backward else ''}"

    @property
    def full_name(self) -> str:
        """With checkpointing, which the table has in parts of its own."""
        return (
            self.name
            + {"none": "", "layers": ", checkpointing", "offload": ", offloaded checkpointing"}[self.checkpointing]
        )


def blocks_fit(case: Case) -> bool:
    """Whether q, k and v, and gate and up, can be one product each in blocks: `nn/frozen_group.py`."""
    config = case.config
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    outputs = (config["num_attention_heads"] * case.head_dim, kv_heads * case.head_dim, config["intermediate_size"])
    return not any(n % BLOCK for n in outputs)


def options_of(case: Case, *, compiled: bool, fp8_head: bool) -> list[Option]:
    """What exists today: each without checkpointing, then with it. The first is what others are compared with."""
    fp8 = Option("fp8", "delayed", compiled=compiled, fp8_head=fp8_head)
    bf16 = [Option("hf", compiled=compiled), Option("own", compiled=compiled)]
    if not case.frozen:
        ways = [*bf16, replace(bf16[1], optimizer="adamw4bit"), replace(fp8, weight_bytes=4)]
        ways += [replace(fp8, optimizer=optimizer) for optimizer in BY_EXACTNESS]
        # adamwfp8 takes as much as adamw8bit: once is enough.
        kept = [replace(fp8, activations="fp8", optimizer=name) for name in BY_EXACTNESS if name != "adamwfp8"]
        ways += [*kept, *(replace(way, in_backward=True) for way in kept)]
        kinds: tuple[str, ...] = ("none", "layers")
    else:
        recipes = ("channel", "block") if blocks_fit(case) else ("channel",)
        ways = [*bf16, *(replace(fp8, recipe=recipe, adapter_bytes=4) for recipe in recipes)]
        kinds = CHECKPOINTING
    return [replace(way, checkpointing=kind) for kind in kinds for way in ways]
