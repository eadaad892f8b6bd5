"""The plan of a BDH: what `octavo train` and the fused layers take, from a simulated step (`simulate.py`).

    forward     layers compute; what they keep grows
    backward    the last layer goes backward, with everything kept
    optimiser   weights, gradients and states

Weights, gradients and states are in FP32 (low-bit states aside) whatever the products are in. Layers share their
weights, so gradients are complete only when the first layer has gone backward.
"""

from octavo.models.bdh import BDHConfig
from octavo.tools.plan.options import BDH_NAMES, Option
from octavo.tools.plan.persistent import FP32, LOW_BIT_STATES
from octavo.tools.plan.simulate import simulate
from octavo.tools.plan.timeline import WORKSPACE, Memory, Moment
from octavo.tools.shapes import Case

NOTE = (
    "Of BDH a step is simulated as it runs, not compiled. FP8 autocast is what octavo train does; FP8 fused is "
    "octavo.models.bdh_fused.fuse."
)


def bdh_options() -> list[Option]:
    fp32, bf16, autocast, fused = (Option(code, weight_bytes=FP32, compiled=False) for code in BDH_NAMES)
    low_bit = ("adamw8bit", "adamw4bit")
    return [
        fp32,
        bf16,
        *(_with_states(autocast, name) for name in ("adamw", *low_bit)),
        *(_with_states(fused, name) for name in ("adamw", *low_bit)),
    ]


def _with_states(option: Option, name: str) -> Option:
    return Option(option.code, optimizer=name, weight_bytes=FP32, compiled=False)


def plan_bdh(case: Case, option: Option, *, accumulates: bool = False, dropout: float = 0.0) -> Memory:
    """Return the memory of a BDH. `accumulates`: over several micro-batches, so that forward has gradients, too."""
    fields = {name: value for name, value in case.config.items() if name != "model_type"}
    shape = BDHConfig(**{**fields, "layers": case.layers, "dropout": dropout})
    found = simulate(shape, option.code, case.tokens // case.seq, case.seq)
    numbers = shape.parameter_count
    weights = gradients = numbers * FP32
    states = bdh_states(numbers, option.optimizer)
    before = gradients if accumulates else 0

    def moment(name: str, gradients: int, activations: int, total: int) -> Moment:
        return Moment(name, weights, gradients, states, activations, total - activations + WORKSPACE)

    moments = [
        moment("forward", before, min(found.kept, found.forward), found.forward),
        moment("backward", before + found.gradients, found.kept, found.backward - found.gradients),
    ]
    if option.optimizer is not None:
        moments.append(moment("optimiser", gradients, 0, 0))
    return Memory(option, tuple(moments), {"by all layers": found.kept})


def bdh_states(numbers: int, optimizer: str | None) -> int:
    if optimizer is None:
        return 0
    if optimizer == "adamw":
        return 2 * numbers * FP32
    size, block = LOW_BIT_STATES[optimizer]
    return round(2 * numbers * (size + FP32 / block))
