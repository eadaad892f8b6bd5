"""The memory plan of a BDH, for `octavo train` and for the fused layers, from a simulated step (`simulate.py`).

    forward     layers compute, and save ever more for backward
    backward    the last layer goes backward, with everything saved
    optimiser   weights, gradients and states

Weights, gradients and states are in FP32 (low-bit states aside) whatever the products are in. Layers share their
weights, so gradients are complete only when the first layer has gone backward.
"""

from collections.abc import Mapping
from typing import Any

from octavo.models.bdh import BDHConfig
from octavo.optim.step_memory import StepMemory
from octavo.tools.bdh import CODES
from octavo.tools.bdh.simulate import simulate
from octavo.tools.plan.options import Option
from octavo.tools.plan.persistent import FP32, LOW_BIT_STATES
from octavo.tools.plan.timeline import WORKSPACE, Memory, Moment
from octavo.tools.shapes import Case

NOTE = (
    "A step of BDH is simulated as it runs, not compiled. FP8 fused is what octavo train does with FP8 tensor cores; "
    "the others need --no-fused or --no-compile."
)


def bdh_options() -> list[Option]:
    """Return the ways to train that a plan compares."""
    fp32, bf16, autocast, fused = (Option(code, weight_bytes=FP32, compiled=False) for code in CODES)
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
    """Return the memory that a training step takes.

    `accumulates`: over several micro-batches, so that gradients are there in forward as well.
    """
    fields = {name: value for name, value in case.config.items() if name != "model_type"}
    shape = BDHConfig(**{**fields, "layers": case.layers, "dropout": dropout})
    simulated = simulate(shape, option.code, case.tokens // case.seq, case.seq)
    numbers = shape.parameter_count
    weights = gradients = numbers * FP32
    states = bdh_states(numbers, option.optimizer)
    before = gradients if accumulates else 0

    def moment(name: str, gradients: int, activations: int, total: int) -> Moment:
        return Moment(name, weights, gradients, states, activations, total - activations + WORKSPACE)

    moments = [
        moment("forward", before, min(simulated.saved, simulated.forward), simulated.forward),
        moment("backward", before + simulated.gradients, simulated.saved, simulated.backward - simulated.gradients),
    ]
    if option.optimizer is not None:
        moments.append(moment("optimiser", gradients, 0, 0))
    return Memory(option, tuple(moments), {"by all layers": simulated.saved})


def bdh_states(numbers: int, optimizer: str | None) -> int:
    """Return the bytes of the optimiser's states."""
    if optimizer is None:
        return 0
    if optimizer == "adamw":
        return 2 * numbers * FP32
    size, block = LOW_BIT_STATES[optimizer]
    return round(2 * numbers * (size + FP32 / block))


def bdh_code(model: str, case: Case, option: Option) -> str:
    """Return the command that trains as the option says."""
    size, batch = model.removeprefix("bdh-"), case.tokens // case.seq
    precision = "fp8" if option.code == "bdh-fused" else option.code.removeprefix("bdh-")
    code = {"bdh-fused": "--fused", "bdh-fp8": "--no-fused --no-compile"}.get(option.code, "--no-compile")
    return f"octavo train --size {size} --precision {precision} {code} --optimizer {option.optimizer} " + (
        f"--layers {case.layers} --batch {batch} --seq {case.seq} --micro-batches 1"
    )


def planned_run(config: Mapping[str, Any]) -> StepMemory | None:
    """Return the plan for a run of `octavo train`, from its `config.json`; None where the plan does not cover it.

    It covers steps that are not compiled, and in FP8 one scale per tensor, on tensor cores.
    """
    if "shape" not in config:
        return None
    precision, fp8 = config["precision"], config["fp8"]
    if precision == "fp8" and (config.get("emulated") or fp8.get("granularity") != "tensor"):
        return None
    fused = precision == "fp8" and config.get("fused", False)  # and not the BF16 it is compared with
    if config.get("compile") and not fused:
        return None
    shape = dict(config["shape"])
    dropout = shape.pop("dropout")
    tokens = config["batch"] * config["seq"]
    case = Case(config["model"], {"model_type": "bdh", **shape}, shape["layers"], tokens, config["seq"], 0, "cpu")
    code = "bdh-fused" if fused else f"bdh-{precision}"
    option = Option(code, optimizer=config["optimizer"], weight_bytes=4, compiled=False)
    memory = plan_bdh(case, option, accumulates=config["micro_batches"] > 1, dropout=dropout)
    step = memory.moments[-1]  # the optimiser's, when all gradients are there
    return StepMemory("plan", step.weights, step.gradients, step.states, memory.host, memory.peak.total)
