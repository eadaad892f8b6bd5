"""The bench's arithmetic and its protocol, piece by piece."""

import io
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from bench_cases import preset

from octavo import ops
from octavo.decoders import graphs
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.numerics.config import RECIPES
from octavo.numerics.operand import LAYOUTS
from octavo.numerics.scaling import SCALE
from octavo.tools.bench.check import check, failure
from octavo.tools.bench.contenders import AGAINST, Contender, make_contenders
from octavo.tools.bench.gemm import gemms
from octavo.tools.bench.kernels import _measure, gated_passes, passes, works
from octavo.tools.bench.prepared_model import PreparedModel
from octavo.tools.bench.result import add_figures, fail_row, new_row, without_folders
from octavo.tools.bench.runner import run_bench
from octavo.tools.bench.worker import Worker, scaling_rates, serve
from octavo.tools.shapes import LLAMAS, Case

PLAIN = Contender("bf16-eager", "bf16", compile=False)
BDH_SHAPE = {"model_type": "bdh", "dim": 16, "heads": 2, "neurons": 32, "layers": 2, "vocabulary": 256}


def bdh(**changes) -> Case:
    case = Case(name="small", config=BDH_SHAPE, layers=2, tokens=32, seq=16, seed=0, device="cpu")
    return replace(case, **changes)


def test_presets_have_the_sizes_their_names_promise():
    """Llama 3.2 1B ties its embedding; here there are two matrices, 0.26 billion more."""
    assert preset("1b").parameters == pytest.approx(1.50e9, rel=0.01)
    assert preset("3b").parameters == pytest.approx(3.61e9, rel=0.01)
    assert preset("8b").parameters == pytest.approx(8.03e9, rel=0.01)
    assert preset("bdh-100m").parameters == pytest.approx(1.01e8, rel=0.01)
    assert preset("8b", layers=8).layers == 8


def test_flops_against_a_count_by_torch():
    """torch counts every product that runs. BDH computes whole score matrices: the formula counts half of them."""
    from torch.utils.flop_counter import FlopCounterMode

    case = bdh()
    prepared = PreparedModel(case, PLAIN)
    with FlopCounterMode(display=False) as counter:
        prepared.step()
    assert counter.get_total_flops() == case.flops + case.attention_flops

    pytest.importorskip("transformers")
    case = preset("tiny")
    assert case.flops == 6 * case.matmul_parameters * 256 + 6 * 64 * 256 * 64 * 2
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        x = torch.randn(case.tokens, 64, requires_grad=True)
        for linear in case.linears:
            for _ in range(linear.count):
                w = torch.randn(linear.n, linear.k, requires_grad=True)
                (x.new_ones(case.tokens, linear.k).requires_grad_() @ w.t()).sum().backward()
    assert counter.get_total_flops() == 6 * case.matmul_parameters * case.tokens


def test_gemms_are_three_for_every_linear():
    case = preset("8b", tokens=8192)
    assert len(gemms(case)) == 15
    body = sum(g.flops for g in gemms(case) if g.linear != "head") * case.layers
    head = sum(g.flops for g in gemms(case) if g.linear == "head")
    assert case.gemm_flops(fp8=True, fp8_head=False) == {"fp8": body, "bf16": head}
    assert case.gemm_flops(fp8=True, fp8_head=True) == {"fp8": body + head, "bf16": 0}
    assert case.gemm_flops(fp8=False, fp8_head=False) == {"fp8": 0, "bf16": body + head}


def test_passes_are_those_of_the_kernels():
    pytest.importorskip("triton")
    from octavo.kernels.delayed import AGAIN
    from octavo.kernels.quantize import _LaunchBuilder

    x = torch.empty(256, 256, dtype=torch.bfloat16)
    for name, layout in itertools.product(RECIPES, LAYOUTS):
        for operand in ("x", "w", "g"):
            recipe = getattr(FP8TrainingConfig.from_recipe(name).recipe, operand)
            launches = _LaunchBuilder([x], recipe, torch.Size()).build(True, layout)._launches
            launches = [one for one in launches if one.constants.get("SCALING") != AGAIN.value]  # returns at once
            # Per channel, one more folds the maxima that the rows' pass leaves, which are few.
            reading = [launch for launch in launches if 0 in launch.tensors]
            assert len(reading) == passes(recipe, layout), (name, operand, layout)


def test_what_a_gated_mlp_moves():
    size = 1000
    actual = {
        name: gated_passes(FP8TrainingConfig.from_recipe(name).recipe, size, fused=name != "channel")
        for name in RECIPES
    }
    assert actual["delayed"] == ((1, 0), (1, 0)) and actual["current"] == ((2, 0), (2, 0))
    assert actual["block"] == actual["mx"] == ((1, 0), (2, 0))
    # h is written and read; the gradients, twice as large, are written and read twice, and so is h for its columns.
    assert actual["channel"] == ((1, 2 * size), (1, 3 * 2 * size + 3 * size))


def test_columns_are_timed_with_a_scale_that_is_known(monkeypatch):
    asked = []

    def quantize_group(xs, row, recipe, record, layout, scale=None):
        asked.append((layout, record, scale is not None, row[SCALE].item() > 0))
        return plain(xs, row, recipe, record, layout, scale)

    plain = ops.quantize_group
    monkeypatch.setattr(ops, "quantize_group", quantize_group)
    work = next(w for w in works(preset("tiny")) if (w.recipe, w.operand, w.layout) == ("delayed", "w", "columns"))
    assert _measure(work, "cpu", 1.0)["status"] == "timed"
    assert asked[0] == ("rows", True, False, False) and set(asked[1:]) == {("columns", False, True, True)}


def test_contenders():
    def names(case, **changes):
        options = {"recipes": ["delayed"], "head": "bf16", "wgrad": "recipe", "against": ["bf16-eager"]}
        actual, reasons = make_contenders(case, compile=True, **{**options, **changes})
        return [contender.name for contender in actual], reasons

    llama = preset("tiny")
    chosen = ["delayed+fp8-head", "block+wgrad-channel", "block+wgrad-channel+fp8-head"]
    assert names(llama, recipes=chosen)[0][1:] == [
        "octavo delayed fp8-head",
        "octavo block wgrad-channel",
        "octavo block wgrad-channel fp8-head",
    ]
    assert names(llama, recipes=["delayed", "block"], head="both", wgrad="both")[0] == [
        "bf16-eager",
        "octavo delayed",
        "octavo delayed fp8-head",
        "octavo block",
        "octavo block wgrad-channel",
        "octavo block fp8-head",
        "octavo block wgrad-channel fp8-head",
    ]
    whole = {"recipes": ["block+graphs", "delayed+fp8-head+in-backward"], "optimizers": ["adamw", "adamwfp8"]}
    assert names(replace(llama, device="cuda"), **whole)[0] == [
        "bf16-eager",
        "octavo block graphs adamw",
        "octavo block graphs adamwfp8",
        "octavo delayed fp8-head in-backward adamw",
        "octavo delayed fp8-head in-backward adamwfp8",
    ]
    actual, reasons = names(bdh(), against=AGAINST)
    assert actual == ["bf16-eager", "bf16-compiled", "octavo delayed", "octavo delayed fused"]
    assert set(reasons) == {"octavo-bf16", "torchao", "torchao-row", "te", "unsloth", "peft"}


@pytest.mark.parametrize(
    ("targets", "members"),
    [
        ("attention", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("mlp", ["gate_proj", "up_proj", "down_proj"]),
        ("all", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    ],
)
def test_adapters_are_where_the_formula_counts_them(targets, members):
    pytest.importorskip("peft")
    case = preset("tiny", mode="lora", rank=4, targets=targets)
    model = PreparedModel(case, PLAIN).model
    adapters = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in adapters} == set(members)
    assert sum(adapters.values()) == case.adapter_parameters
    fp8 = case.gemm_flops(fp8=True, fp8_head=True)
    assert fp8 == {"fp8": 4 * case.matmul_parameters * 256, "bf16": 6 * case.adapter_parameters * 256}


def test_lora_flops_against_a_count_by_torch():
    """Of the linears alone: torch counts no attention on a CPU. Without adapters backward goes through every layer."""
    from torch.utils.flop_counter import FlopCounterMode

    pytest.importorskip("peft")
    case = preset("tiny", mode="lora", rank=0)
    prepared = PreparedModel(case, PLAIN)
    with FlopCounterMode(display=False) as counter:
        prepared.step()
    assert _products(counter) == case.flops - case.attention_flops

    case = preset("tiny", mode="lora", rank=4)
    prepared = PreparedModel(case, PLAIN)
    with FlopCounterMode(display=False) as counter:
        prepared.step()
    # The first layer's input has no gradient: neither of q, k and v nor of their adapters.
    spared = 2 * 256 * (64 * 128 + 3 * 4 * 64)
    assert _products(counter) == case.flops - case.attention_flops - spared


def _products(counter) -> int:
    """Of matrices: rotary embeddings and attention are batched."""
    return counter.get_flop_counts()["Global"][torch.ops.aten.mm]


def test_weights_come_back_as_they_were():
    prepared = PreparedModel(bdh(), PLAIN)
    before = {name: p.detach().clone() for name, p in prepared.model.named_parameters()}
    identity = [id(p) for p in prepared.model.parameters()]
    prepared.step()
    prepared.park()
    assert all(p.untyped_storage().nbytes() == 0 and p.grad is None for p in prepared.model.parameters())
    prepared.unpark()
    assert [id(p) for p in prepared.model.parameters()] == identity
    assert all(torch.equal(p, before[name]) for name, p in prepared.model.named_parameters())


def test_a_frozen_base_without_adapters_is_checked_by_the_gradient_of_its_input():
    pytest.importorskip("peft")
    case = preset("tiny", mode="lora", rank=0)
    assert case.flops == 4 * case.matmul_parameters * 256 + case.attention_flops
    cosines = []
    for contender in (
        PLAIN,
        Contender("octavo-bf16", "octavo-bf16", False),
        Contender("c", "octavo", False, "channel"),
    ):
        actual, _ = check(case, contender)
        assert actual["failure"] == "" and actual["worst_parameter"] == "embedding's output"
        cosines.append(actual["cosine"])
    assert cosines[:2] == pytest.approx([1.0, 1.0], abs=1e-4) and 0.99 < cosines[2] < 1 - 1e-4


@pytest.mark.parametrize("rank", [0, 4])
def test_a_frozen_base_comes_back_and_a_dropped_one_takes_no_memory(rank):
    pytest.importorskip("peft")
    case = preset("tiny", mode="lora", rank=rank)
    for contender in (PLAIN, Contender("octavo channel", "octavo", compile=False, recipe="channel")):
        prepared = PreparedModel(case, contender)
        before = {name: p.detach().clone() for name, p in prepared.model.named_parameters()}
        loss = prepared.step()
        prepared.park()
        assert not any(gradient is not None for gradient in prepared.gradients().values())
        prepared.unpark()
        assert all(torch.equal(p, before[name]) for name, p in prepared.model.named_parameters())
        assert torch.equal(prepared.step(), loss)
        prepared.drop()
        assert all(p.untyped_storage().nbytes() == 0 for p in prepared.model.parameters() if p.dim() >= 2)


def test_the_check_sees_a_wrong_gradient(monkeypatch):
    octavo = Contender("octavo delayed", "octavo", compile=False, recipe="delayed")
    actual, _ = check(bdh(), octavo)
    assert actual["failure"] == "" and actual["cosine"] > 0.95 and actual["worst_parameter"]

    step = PreparedModel.step

    def scrambled(self):
        loss = step(self)
        if self.scaling is not None:
            for parameter in self.model.parameters():
                parameter.grad.neg_()
        return loss

    monkeypatch.setattr(PreparedModel, "step", scrambled)
    assert "gradient cosine -0.9" in check(bdh(), octavo)[0]["failure"]


@pytest.mark.parametrize(
    ("difference", "cosine", "word"),
    [
        (0.03, 0.99, "loss off by +3.00%"),
        (-0.03, 0.99, "loss off by -3.00%"),
        (math.nan, 0.99, "loss off by"),
        (0.0, 0.8, "cosine 0.800"),
        (0.0, math.nan, "cosine nan"),
        (0.019, 0.91, ""),
    ],
)
def test_what_fails_the_check(difference, cosine, word):
    actual = failure({"loss_difference": difference, "cosine": cosine})
    assert word in actual and bool(actual) == bool(word)


def test_rates_are_grouped_by_operand():
    scaling = FP8ScalingManager()
    for name, underflow in (("layer.0.q.x", 0.25), ("layer.1.q.x", 0.75), ("layer.0.q.w", 0.5)):
        row = scaling.register(name)
        row[5], row[6] = 2 * underflow, 2
    rates = scaling_rates(scaling)
    assert (rates["x"]["underflow_mean"], rates["x"]["underflow_max"], rates["x"]["tensors"]) == (0.5, 0.75, 2)
    assert rates["w"]["underflow_max"] == 0.5 and rates["w"]["saturated_max"] == 0
    assert scaling_rates(None) == {}


def test_a_worker_answers_errors_in_one_line_and_stops():
    case = bdh()
    lines = [{"case": case.to_dict(), "contender": PLAIN.to_dict()}, {"do": "start"}, {"do": "time", "steps": 1}]
    answers = io.StringIO()
    serve(io.StringIO("".join(json.dumps(line) + "\n" for line in [*lines, {"do": "check"}])), answers)
    first, second = map(json.loads, answers.getvalue().splitlines())
    assert first == {} and second["error"].startswith("AssertionError")


def test_wrong_and_failing_contenders_have_no_speed_and_do_not_stop_the_others():
    missing = Contender("nobody", "octavo", compile=False, recipe="no such recipe")
    heard: list[str] = []
    actual = run_bench(bdh(), [missing, PLAIN], {"te": "not installed"}, rounds=1, steps=1, warmup=1, say=heard.append)
    failed, timed, absent = actual["rows"]
    assert failed["status"] == "failed" and "no such recipe" in failed["reason"] and "figures" not in failed
    assert timed["status"] == "timed" and timed["figures"]["step_s"] > 0
    assert absent == {"name": "te", "status": "not run", "reason": "not installed"}
    assert any(line.startswith("nobody: ") for line in heard)


def test_figures_of_a_made_up_run():
    case = preset("8b", tokens=8192)
    ceilings = {"bf16": 800.0, "fp8": 1400.0}
    base = new_row(Contender("bf16-compiled", "bf16", True))
    own = new_row(Contender("octavo delayed", "octavo", True, "delayed"))
    for row, seconds in ((base, 0.6), (own, 0.4)):
        row["turns"] = [
            {"times": [seconds, seconds * 1.1, seconds * 0.9], "peak_gib": 80.0, "loss": 11.8, "scaling": {}}
        ]
    failed = new_row(Contender("octavo block", "octavo", True, "block"))
    fail_row(failed, "failed", "OutOfMemoryError: see /home/someone/trace.txt")
    add_figures([base, own, failed], case, ceilings)
    assert own["figures"]["speedup_bf16-compiled"] == pytest.approx(1.5)
    assert own["figures"]["speedup_octavo-bf16"] is None
    flops = case.gemm_flops(True, False)
    assert own["figures"]["gemm_floor_s"] == pytest.approx(flops["fp8"] / 1400e12 + flops["bf16"] / 800e12)
    assert "figures" not in failed and failed["reason"] == "OutOfMemoryError: see trace.txt"


def test_without_folders():
    assert without_folders("octavo bench --config /a/b/c.json --out=/x/y") == "octavo bench --config c.json --out=y"
    assert without_folders("12 TFLOP/s at 3/4 of a/b") == "12 TFLOP/s at 3/4 of a/b"


def test_llama_presets_are_what_transformers_builds():
    """`PreparedModel` compares the model's linears with the formula and refuses if they differ."""
    pytest.importorskip("transformers")
    assert PreparedModel(preset("tiny"), PLAIN).step().isfinite()
    wrong = replace(preset("tiny"), config={**LLAMAS["tiny"], "model_type": "phi"})
    with pytest.raises(ValueError, match="TFLOP/s would be wrong"):
        PreparedModel(wrong, PLAIN)


def test_what_is_parked_holds_no_recording(monkeypatch):
    """Its memory is others' then, and its weights come back elsewhere; no timed step may be the one that records."""
    done = []
    monkeypatch.setattr(graphs, "use_cuda_graphs", lambda _model, enabled=True, **_: done.append(enabled))
    monkeypatch.setattr(graphs, "recordings", lambda _model: done.count("step") >= 2)
    monkeypatch.setattr(graphs, "reserved_bytes", lambda _model: 0)
    monkeypatch.setattr(PreparedModel, "step", lambda _self: done.append("step") or torch.zeros(()))
    worker = Worker(preset("tiny"), Contender("octavo delayed graphs", "octavo", False, "delayed", graphs=True))
    worker.load(warmup=2)
    assert done == [True, "step", "step", False]
    done.clear()
    worker.time(steps=1)
    assert done == [True, "step", "step", "step", False]
