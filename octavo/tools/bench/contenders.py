"""Contenders of a benchmark. One that cannot run here keeps its row, with the reason: nothing is dropped silently."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

from octavo.nn.groups import FP8_ONLY_GRANULARITIES
from octavo.numerics import FP8TrainingConfig
from octavo.numerics.checks import check_choice
from octavo.numerics.config import RECIPES
from octavo.optim import OPTIMIZERS
from octavo.tools.bench.workload import FIXED, TRAINERS
from octavo.tools.shapes import Case
from octavo.training.errors import UserError

BASELINE = "bf16-compiled"
OWN_BASELINE = "octavo-bf16"
PEERS = ("bf16-eager", BASELINE, OWN_BASELINE, "torchao")  # of a workload, unless the user says
AGAINST = (*PEERS, "torchao-row", "te", "unsloth", "peft")
EXTRAS = ("fp8-head", "wgrad-channel", "graphs", "fp8-activations", "weights-only")
STEP_EXTRAS = ("in-backward", "offload-optimizer", "offload-master")  # for whole steps: see `octavo.optim`
OURS = ("octavo", "octavo-bf16", "octavo-fused")
HEADS = ("bf16", "fp8", "both")
WGRADS = ("recipe", "channel", "both")
FROZEN = {
    "block": "block",
    "channel": "channel",
    "current": "tensor",
}  # recipes, and the granularity of a frozen weight's scales
_PACKAGES = {
    "peft": "peft",
    "torchao": "torchao",
    "torchao-row": "torchao",
    "te": "transformer_engine",
    "unsloth": "unsloth",
}


@dataclass(frozen=True)
class Contender:
    """One way to run the model.

    `kind`: how its model is prepared (`prepared_model.py`): bf16, octavo, octavo-bf16, octavo-fused, torchao,
    torchao-row, te, or peft: stock PEFT, whose adapters are in FP32.
    """

    name: str
    kind: str
    compile: bool
    recipe: str | None = None
    fp8_head: bool = False
    wgrad: str | None = None
    graphs: bool = False  # replayed from CUDA graphs
    weights_only: bool = False  # a frozen base in FP8, products in BF16
    activations: str = "bf16"
    optimizer: str | None = None  # if given, whole steps are timed, including its update
    in_backward: bool = False
    offload: str | None = None

    @property
    def fp8_products(self) -> bool:
        return self.kind not in ("bf16", "octavo-bf16") and not self.weights_only

    @property
    def without_optimizer(self) -> "Contender":
        """The same contender without its optimiser step."""
        return replace(self, optimizer=None, in_backward=False, offload=None)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def default_against(case: Case, workload: str) -> tuple[str, ...]:
    """Return what Octavo is compared with unless the user says."""
    if workload == FIXED:
        return tuple(name for name in AGAINST if name != "peft")
    return (*PEERS, "peft") if case.frozen else PEERS


def make_contenders(
    case: Case,
    *,
    recipes: Sequence[str],
    head: str,
    wgrad: str,
    against: Sequence[str],
    compile: bool,
    optimizers: Sequence[str] = (),
    workload: str = FIXED,
    compile_ours: bool | None = None,
) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders that can run, baselines first, and the reasons for those that cannot.

    `optimizers`: time whole steps with each of these; other libraries run AdamW. `compile_ours`: for Octavo's own;
    as `compile` by default.
    """
    ours = compile if compile_ours is None else compile_ours
    for name in optimizers:
        check_choice("optimizer", name, OPTIMIZERS)
    check_choice("head", head, HEADS)
    check_choice("wgrad", wgrad, WGRADS)
    for item in recipes:
        _check_recipe(item, case, whole=bool(optimizers))
    if case.frozen:
        _check_lora(recipes, wgrad)
    for name in against:
        check_choice("against", name, AGAINST)
    if wgrad != "recipe" and "block" not in recipes:
        raise UserError(f"--wgrad {wgrad}: a choice within the block recipe; add block to --recipe")
    case.family.check_head(case, head)

    if workload != FIXED:
        _check_workload(case, workload, recipes, optimizers)

    reasons = {name: reason for name in against if (reason := _why_not(name, case, compile, workload))}
    chosen = [_other(name, ours if name in OURS else compile) for name in against if name not in reasons]
    for item in recipes:
        recipe, *extras = item.split("+")
        if extras:
            chosen.append(_with_extras(recipe, extras, ours))
        else:
            chosen += case.family.contenders(recipe, head, wgrad if recipe == "block" else "recipe", ours)
    return _with_optimizers(chosen, optimizers) if optimizers else chosen, reasons


def _check_workload(case: Case, workload: str, recipes: Sequence[str], optimizers: Sequence[str]) -> None:
    case.family.check_workload(workload)
    if case.frozen and not case.rank:
        raise UserError(f"--rank 0: with --workload {workload} something has to be trained; give a rank")
    for item in recipes:
        if "graphs" in item.split("+"):
            raise UserError(f"--recipe {item}: CUDA graphs are of one length; with --workload {workload} leave it out")
    if workload in TRAINERS and optimizers:
        raise UserError(f"--optimizer {','.join(optimizers)}: the Trainer brings AdamW; leave it out")
    for package in ("trl", "datasets") if workload == "sft" else ():
        if find_spec(package) is None:
            raise UserError(f"--workload sft: needs TRL, and {package} is not installed: pip install trl datasets")


def _check_recipe(item: str, case: Case, *, whole: bool) -> None:
    """Check a recipe before any process starts; on a GPU a worker would report it after minutes."""
    name, *extras = item.split("+")
    check_choice("recipe", name, tuple(RECIPES))
    for extra in extras:
        check_choice(f"recipe {name}+", extra, EXTRAS + STEP_EXTRAS)
        if extra in STEP_EXTRAS and not whole:
            raise UserError(f"--recipe {item}: {extra} is of whole steps; add --optimizer adamw, or leave it out")
    if extras:
        case.family.check_extras(item, case)
    if "wgrad-channel" in extras and name != "block":
        raise UserError(f"--recipe {item}: wgrad-channel is a choice within the block recipe")
    if "weights-only" in extras and not case.frozen:
        raise UserError(f"--recipe {item}: weights-only is of a frozen base; add --mode lora, or leave it out")
    if "graphs" in extras and case.device != "cuda":
        raise UserError(f"--recipe {item}: CUDA graphs are of a GPU; leave graphs out on {case.device}")
    if sum(extra.startswith("offload-") for extra in extras) > 1:
        raise UserError(f"--recipe {item}: offload-master moves the states, too; give one of them")
    if "offload-master" in extras:
        if case.frozen:
            raise UserError(f"--recipe {item}: with --mode lora no weight has a master; leave offload-master out")
        if FP8TrainingConfig.from_recipe(name).granularity not in FP8_ONLY_GRANULARITIES:
            able = [r for r in RECIPES if FP8TrainingConfig.from_recipe(r).granularity in FP8_ONLY_GRANULARITIES]
            raise UserError(f"--recipe {item}: weights in FP8 only can be had with one of {', '.join(able)}")


def _with_extras(recipe: str, extras: Sequence[str], compile: bool) -> Contender:
    plain = _octavo(recipe, "fp8-head" in extras, "channel" if "wgrad-channel" in extras else None, compile)
    more = [extra for extra in extras if extra not in ("fp8-head", "wgrad-channel")]
    return replace(
        plain,
        name=" ".join((plain.name, *more)),
        graphs="graphs" in extras,
        weights_only="weights-only" in extras,
        activations="fp8" if "fp8-activations" in extras else "bf16",
        in_backward="in-backward" in extras,
        offload=next((extra.removeprefix("offload-") for extra in extras if extra.startswith("offload-")), None),
    )


def _with_optimizers(contenders: Sequence[Contender], names: Sequence[str]) -> list[Contender]:
    whole_steps = []
    for contender in contenders:
        if contender.kind in OURS:
            whole_steps += [replace(contender, name=f"{contender.name} {name}", optimizer=name) for name in names]
        else:
            whole_steps.append(replace(contender, optimizer="adamw"))
    return whole_steps


def _check_lora(recipes: Sequence[str], wgrad: str) -> None:
    """Check that a frozen base can be stored by each recipe, and that no option concerns gradients of weights."""
    for item in recipes:
        if item.split("+")[0] not in FROZEN:
            raise UserError(f"--recipe {item}: with --mode lora one of {', '.join(FROZEN)}")
        if "fp8-activations" in item:
            raise UserError(f"--recipe {item}: beside frozen weights activations are kept in FP8 anyway; leave it out")
    if wgrad != "recipe" or any("wgrad-channel" in item for item in recipes):
        raise UserError("--wgrad: with --mode lora no weight has a gradient; leave it out")


def decoder_contenders(recipe: str, head: str, wgrad: str, compile: bool) -> list[Contender]:
    """Return Octavo's own ways to run a decoder in a recipe."""
    contenders = []
    for fp8_head in {"bf16": (False,), "fp8": (True,), "both": (False, True)}[head]:
        for w in {"recipe": (None,), "channel": ("channel",), "both": (None, "channel")}[wgrad]:
            contenders.append(_octavo(recipe, fp8_head, w, compile))
    return contenders


def _octavo(recipe: str, fp8_head: bool, wgrad: str | None, compile: bool) -> Contender:
    name = f"octavo {recipe}" + (f" wgrad-{wgrad}" if wgrad else "") + (" fp8-head" if fp8_head else "")
    return Contender(name, "octavo", compile, recipe, fp8_head, wgrad)


def _other(name: str, compile: bool) -> Contender:
    if name == "bf16-eager":
        return Contender(name, "bf16", False)
    if name == BASELINE:
        return Contender(name, "bf16", True)
    # Transformer Engine's modules break the graph of a layer: compiling around them only adds guards. PEFT is stock.
    return Contender(name, name, compile and name not in ("te", "peft"))


def _why_not(name: str, case: Case, compile: bool, workload: str) -> str:
    package = _PACKAGES.get(name)
    if package is not None and find_spec(package) is None:
        return "not installed"
    if name == "unsloth":
        return "not in this bench yet" if case.frozen else "not in --mode full: it fine-tunes adapters"
    if name == "peft" and not case.rank:
        return "there are no adapters; add --mode lora"
    if name == "te" and workload != FIXED:
        return f"not in --workload {workload}: it takes numbers of tokens that 8 divides"
    if name == "te" and case.rank:
        return "PEFT does not wrap its linears"
    if name == BASELINE and not compile:
        return "left out by --no-compile"
    return case.family.why_not(name, package is not None)
