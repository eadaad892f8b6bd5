"""The plan of a BDH: simulated steps against real ones, and through the command."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from allocations import allocated

from octavo.models.bdh import BDH, BDHConfig
from octavo.tools.bdh import CODES
from octavo.tools.bdh import simulate as simulation
from octavo.tools.bdh.plan import bdh_code, bdh_options, plan_bdh, planned_run
from octavo.tools.bdh.simulate import simulate
from octavo.tools.plan.options import Option
from octavo.tools.plan.request import Request
from octavo.tools.plan.run import make_plan
from octavo.tools.plan.timeline import GIB, WORKSPACE
from octavo.tools.shapes import Case
from octavo.training.settings import TrainSettings

Invoke = Callable[..., tuple[int, str, str]]
SMALL = BDHConfig(dim=32, heads=2, neurons=256, layers=3)
MEASURED = Path(__file__).parent.parent.parent / "benchmarks" / "results" / "2026-11-16-h200-bdh-100m-6l.json"


@pytest.mark.parametrize(("code", "dtype"), [("bdh-fp32", None), ("bdh-bf16", torch.bfloat16)])
def test_a_simulated_step_takes_what_a_real_one_does(code, dtype):
    model = BDH(SMALL)
    tokens = torch.zeros(3, 64, dtype=torch.int64)

    def step():
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(tokens, tokens)[1]
        loss.backward()

    step()
    model.zero_grad()
    # A CPU's BF16 products make temporary copies of their own.
    assert simulate(SMALL, code, 3, 64).backward == pytest.approx(allocated(step), rel=0.05)


@pytest.mark.parametrize("code", CODES)
def test_two_steps_tell_of_any_batch(code):
    for batch in (1, 2, 5):
        assert simulate(SMALL, code, batch, 64) == simulation._sequences(SMALL, code, batch, 64)


def test_the_fused_layers_as_measured():
    """On an H200, with weights and gradients in BF16, two bytes less for each than a run has."""
    result = json.loads(MEASURED.read_text())
    row = next(row for row in result["rows"] if row["kind"] == "octavo-fused")
    case = Case.from_dict(result["case"])
    planned = plan_bdh(case, Option("bdh-fused", optimizer=None, weight_bytes=4, compiled=False)).peak.total
    fewer = 2 * 2 * case.parameters
    assert (planned - fewer) / GIB == pytest.approx(max(turn["peak_gib"] for turn in row["turns"]), rel=0.01)


def test_fp8_with_4_bit_states_takes_less_than_half_of_fp32():
    memories = {memory.option.name: memory.peak.total for memory in make_plan(Request("bdh-100m")).memories}
    assert memories["FP8 fused, adamw4bit"] < 0.2 * memories["FP32, adamw"]
    assert memories["FP8 autocast, adamw4bit"] < 0.4 * memories["FP32, adamw"]
    assert list(memories.values()) == sorted(memories.values(), reverse=True)


def test_moments_add_up():
    case = Request("bdh-tiny", batch=3, seq=64).case
    weights = 4 * case.parameters
    states = {"adamw": 2, "adamw8bit": 2.03125 / 4, "adamw4bit": 1.0625 / 4}  # of weights
    for option in bdh_options():
        memory = plan_bdh(case, option)
        forward, _, optimiser = memory.moments
        assert forward.weights == weights and optimiser.gradients == weights and optimiser.activations == 0
        assert forward.states == states[option.optimizer] * weights
        expected = simulate(BDHConfig.preset("tiny"), option.code, 3, 64).forward
        assert forward.activations + forward.buffers - WORKSPACE == expected
        accumulating = plan_bdh(case, option, accumulates=True)
        assert accumulating.moments[0].total - forward.total == weights


def test_the_command(invoke: Invoke) -> None:
    code, output, error = invoke(
        "plan", "bdh-tiny", "--batch", "8", "--seq", "128", "--gpu", "24", "--json", "plan.json"
    )
    assert code == 0 and error == ""
    assert output.startswith("bdh-tiny, 2 million parameters, 4 layers: training, 8 × 128 tokens")
    assert "For 24 GiB: FP8 fused, adamw, batch 8" in output
    assert "octavo train --size tiny --precision fp8 --fused --optimizer adamw" in output
    plan = json.loads(Path("plan.json").read_text())
    assert [option["longest_sequence"] for option in plan["options"]] == [None] * 8
    assert "BF16 autocast" in invoke("plan", "bdh-tiny", "--batch", "8", "--seq", "128", "--gpu", "a100")[1]


@pytest.mark.parametrize("code", CODES)
def test_the_advised_command_runs_the_code_that_was_planned(
    code: str, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings, on a CPU, are planned as the option is."""
    monkeypatch.setattr("octavo.training.loop.train", lambda settings, **_: found.append(settings) or 1 / 0)
    found: list[TrainSettings] = []
    case = Request("bdh-tiny", layers=2, batch=2, seq=64).case
    option = Option(code, optimizer="adamw", weight_bytes=4, compiled=False)
    with pytest.raises(ZeroDivisionError):
        invoke(*bdh_code("bdh-tiny", case, option).split()[1:], "--out", str(tmp_path))
    planned = planned_run({**found[0].to_dict(), "emulated": False})
    assert planned is not None and planned.peak == plan_bdh(case, option).peak.total
    assert (found[0].fused, found[0].compile, found[0].shape.layers) == (code == "bdh-fused", False, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mode", "lora"], ["--mode lora", "no nn.Linear"]),
        (["--offload", "optimizer"], ["--offload optimizer", "leave it out"]),
        (["--head", "fp8"], ["--head fp8"]),
    ],
)
def test_what_bdh_does_not_have(invoke: Invoke, arguments: list[str], words: list[str]) -> None:
    code, output, error = invoke("plan", "bdh-tiny", *arguments)
    assert code == 2 and output == "" and all(word in error for word in words)
