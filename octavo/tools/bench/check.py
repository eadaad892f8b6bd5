"""Correctness first: a contender's loss and whole gradient against plain BF16 on the same weights and tokens.

At full width, on few layers and the run's own tokens, so that what is checked is the very code that is timed next. The
second step counts: by then delayed scaling uses the scales that the first one left.

    cosine = Σ g·r / √(Σ g·g · Σ r·r)        g the contender's gradient, r the reference's, over all parameters
                                              (without any to train, of the embedding's output)
"""

import math
from typing import Any

import torch

from octavo.tools.bench.contenders import Contender
from octavo.tools.bench.prepared_model import PreparedModel
from octavo.tools.bench.workload import Workload
from octavo.tools.shapes import CHECK_LAYERS, Case

LARGEST_LOSS_DIFFERENCE = 0.02
SMALLEST_COSINE = 0.9
REFERENCE = Contender("bf16-eager", "bf16", compile=False)


def check(case: Case, contender: Contender, workload: Workload | None = None) -> tuple[dict[str, Any], PreparedModel]:
    """Return the comparison, ready for JSON, and the model, which owns the compiled code."""
    layers = min(CHECK_LAYERS, case.layers)
    reference = PreparedModel(case, REFERENCE, layers, workload)
    reference_loss = reference.step().item()
    gradients = reference.gradients()

    prepared = PreparedModel(case, contender, layers, workload)
    prepared.step()
    prepared.forget_gradients()
    loss = prepared.step().item()
    result = {
        "layers": layers,
        "tokens": prepared.inputs["input_ids"].numel(),
        "loss": loss,
        "reference_loss": reference_loss,
        "loss_difference": loss / reference_loss - 1,
        **_compare(prepared, gradients),
    }
    reference.drop()
    result["failure"] = failure(result)
    return _finite(result), prepared


def failure(result: dict[str, Any]) -> str:
    """Return why these figures are not those of a correct step; empty if they are. NaN fails every comparison."""
    difference, cosine = result["loss_difference"], result["cosine"]
    if not abs(difference) <= LARGEST_LOSS_DIFFERENCE:
        return f"loss off by {difference:+.2%} from BF16 (allowed: {LARGEST_LOSS_DIFFERENCE:.0%})"
    if not cosine >= SMALLEST_COSINE:
        return f"gradient cosine {cosine:.3f} to BF16 (allowed: {SMALLEST_COSINE} and more)"
    return ""


@torch.no_grad()
def _compare(prepared: PreparedModel, reference: dict[str, torch.Tensor | None]) -> dict[str, Any]:
    sums = torch.zeros(3, dtype=torch.float64)
    worst, worst_name = math.inf, ""
    gradients = prepared.gradients()
    if gradients.keys() != reference.keys():
        raise ValueError(f"it trains {len(gradients)} parameters, the reference {len(reference)}: not the same run")
    for name, gradient in gradients.items():
        expected = reference[name]
        if gradient is None or expected is None:
            raise ValueError(f"{name} has no gradient after a step")
        g, r = gradient.flatten().float(), expected.flatten().float()
        one = torch.stack([g @ r, g @ g, r @ r]).double().cpu()
        sums += one
        cosine = _cosine(one)
        if not cosine >= worst:
            worst, worst_name = cosine, name
    return {"cosine": _cosine(sums), "worst_cosine": worst, "worst_parameter": worst_name}


def _cosine(sums: torch.Tensor) -> float:
    gr, gg, rr = sums.tolist()
    return gr / math.sqrt(gg * rr) if gg * rr != 0 else math.nan


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN, which JSON lacks, by None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
