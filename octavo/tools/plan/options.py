"""Ways to train that a plan compares."""

from dataclasses import asdict, dataclass, replace

from octavo.kernels.tuning import HOPPER, tuning_of
from octavo.nn.cost_model import why_not_frozen
from octavo.numerics.checks import check_choice
from octavo.numerics.quantize import BLOCK
from octavo.optim import OPTIMIZERS
from octavo.tools import bdh
from octavo.tools.plan.gpus import Gpu
from octavo.tools.shapes import Case

CODES = ("hf", "own", "fp8", *bdh.CODES)
RECIPES = ("delayed", "channel", "block")
CHECKPOINTING = ("none", "layers", "offload")
OFFLOADS = ("optimizer", "master")
BY_EXACTNESS = ("adamw", "adamw8bit", "adamwfp8", "adamw4bit")  # optimisers by the precision of their states


@dataclass(frozen=True)
class Option:
    """One way to train a model.

    Fields:
        code: Hugging Face's own in BF16, Octavo's fused pieces in BF16, or those in FP8; or one of BDH's.
        recipe: granularity of the FP8 scales (`delayed`: per tensor).
        optimizer: None for forward and backward alone.
        checkpointing: `layers` saves the input of each layer, `offload` saves it in host memory.
        activations: what trained FP8 layers save, as in `FP8TrainingConfig`.
        in_backward: gradients are applied within backward, one by one.
        offload: `optimizer` has states in host memory; `master` also FP32 weights, with FP8 weights on the GPU.
        fp8_products: with False, a frozen FP8 base multiplies in BF16.
        adapter_bytes: beside FP8, PEFT creates adapters in FP32.
        joined_norms: norms are fused with the products that follow.
        masters: trained BF16 weights have FP32 masters (`optim/split_masters.py`), as with `FastLanguageModel` and
            `FP8Trainer`; `octavo bench` has none.
    """

    code: str
    recipe: str | None = None
    optimizer: str | None = "adamw"
    checkpointing: str = "none"
    compiled: bool = True
    fp8_head: bool = False
    activations: str = "bf16"
    in_backward: bool = False
    offload: str | None = None
    weight_bytes: int = 2  # per weight that is trained, or not in FP8
    adapter_bytes: int = 2
    joined_norms: bool = True
    masters: bool = False
    fp8_products: bool = True

    def __post_init__(self) -> None:
        check_choice("code", self.code, CODES)
        check_choice("checkpointing", self.checkpointing, CHECKPOINTING)
        if self.optimizer is not None:
            check_choice("optimizer", self.optimizer, OPTIMIZERS)
        if self.code == "fp8":
            check_choice("recipe", self.recipe, RECIPES)
        elif self.recipe is not None or self.fp8_head or self.activations != "bf16":
            raise ValueError(f"code={self.code!r} has no FP8: leave recipe, fp8_head and activations out")
        if self.offload is None:
            return
        check_choice("offload", self.offload, OFFLOADS)
        if self.optimizer is None:
            raise ValueError(f"offload={self.offload!r}: without an optimizer there is nothing to offload")
        if self.offload == "master" and not (self.code == "fp8" and self.in_backward and self.weight_bytes == 2):
            raise ValueError(
                "offload='master': FP8 weights with gradients in backward; set code='fp8', in_backward=True"
            )

    @property
    def name(self) -> str:
        fp8 = "FP8 activations" if self.activations == "fp8" else f"FP8 {self.recipe}"
        fp8 = fp8 if self.fp8_products else f"FP8 weights {self.recipe}"
        who = {"hf": "BF16 Hugging Face", "own": "BF16 Octavo", "fp8": fp8, **bdh.CODES}[self.code]
        weights = ", FP32 weights" if self.weight_bytes == 4 and self.code not in bdh.CODES else ""
        return f"{who}{weights}, {self.optimizer}{' in backward' if self.in_backward else ''}"

    @property
    def section(self) -> str:
        """Section of the table in which the option is shown."""
        words = {
            "checkpointing": self.checkpointing == "layers",
            "checkpoints on the host": self.checkpointing == "offload",
            "states on the host": self.offload == "optimizer",
            "master on the host": self.offload == "master",
        }
        effort = ", ".join(word for word, holds in words.items() if holds)
        return f"with {effort}" if effort else ""

    @property
    def full_name(self) -> str:
        return f"{self.name}, {self.section}" if self.section else self.name

    def to_dict(self) -> dict[str, object]:
        """The fields as files of `octavo plan --json` have them."""
        fields = asdict(self)
        fp8_products = fields.pop("fp8_products")
        return {**fields, "wide_products": not fp8_products}


def blocks_fit(case: Case) -> bool:
    """Return True if q, k and v, and gate and up, can be one product each in blocks."""
    config = case.config
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    outputs = (config["num_attention_heads"] * case.head_dim, kv_heads * case.head_dim, config["intermediate_size"])
    return not any(n % BLOCK for n in outputs)


def why_bf16_products(case: Case, gpu: Gpu | None) -> str:
    """Return why a frozen base multiplies in BF16 on this GPU (None: on Hopper); empty if it does not."""
    tuning = HOPPER if gpu is None else tuning_of(gpu.capability)
    shapes = [(linear.k, 1.0, linear.n) for linear in case.linears if linear.name != "head"]
    return why_not_frozen(shapes, tuning)


def options_of(
    case: Case, *, compiled: bool, fp8_head: bool, offload: str | None = None, gpu: Gpu | None = None
) -> list[Option]:
    """Return the options: each without checkpointing, then with it. The first is the baseline.

    `offload`: options that do so, and BF16 (`none`: those that do not); None: all. `gpu`: the one to plan for, if any.
    """
    fp8 = Option("fp8", "delayed", compiled=compiled, fp8_head=fp8_head)
    bf16 = [Option("hf", compiled=compiled), Option("own", compiled=compiled)]
    if not case.frozen:
        ways = [replace(way, masters=way.code != "hf" and way.weight_bytes == 2) for way in _full(bf16, fp8)]
        bf16 = [way for way in ways if way.code in ("hf", "own") and way.optimizer == "adamw"]
        kinds: tuple[str, ...] = ("none", "layers")
    else:
        fp8_products = not why_bf16_products(case, gpu)
        recipes = ("channel",) if fp8_products and not blocks_fit(case) else ("channel", "block")
        frozen = replace(fp8, adapter_bytes=4, fp8_products=fp8_products)
        ways = [*bf16, *(replace(frozen, recipe=recipe) for recipe in recipes)]
        kinds = CHECKPOINTING
    if offload is not None:
        wanted = None if offload == "none" else offload
        ways = [way for way in ways if way in bf16 or way.offload == wanted]
    return [replace(way, checkpointing=kind) for kind in kinds for way in ways]


def _full(bf16: list[Option], fp8: Option) -> list[Option]:
    """Return the options of full training; `adamwfp8` is left out, since it takes as much as `adamw8bit`."""
    bf16_4bit = replace(bf16[1], optimizer="adamw4bit")
    fp8_activations = [replace(fp8, activations="fp8", optimizer=name) for name in BY_EXACTNESS if name != "adamwfp8"]
    released = [replace(way, in_backward=True) for way in fp8_activations]
    return [
        *bf16,
        bf16_4bit,
        replace(fp8, weight_bytes=4),
        *(replace(fp8, optimizer=optimizer) for optimizer in BY_EXACTNESS),
        *fp8_activations,
        *released,
        *(replace(way, offload="optimizer") for way in (replace(bf16_4bit, in_backward=True), *released)),
        *(replace(way, offload="master") for way in released),
    ]
