"""`octavo plan --gpus`: the arithmetic of several GPUs, and the command."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.tools.plan import persistent
from octavo.tools.plan.memory import plan_memory
from octavo.tools.plan.options import options_of
from octavo.tools.plan.request import Request
from octavo.tools.plan.scale.assumptions import FULL, LORA, Assumptions, parse_bandwidth, parse_tflops
from octavo.tools.plan.scale.memory import rank_memory
from octavo.tools.plan.scale.plan import NEAR, make_scale_plan, rows_of
from octavo.tools.plan.scale.request import ScaleRequest, parse_gpus
from octavo.tools.plan.scale.schedule import UnitTime, step_seconds
from octavo.tools.plan.scale.step import plan_step
from octavo.tools.plan.scale.units import Part, units_of
from octavo.tools.plan.scale.ways import STRATEGIES, Way, ways_of
from octavo.tools.plan.scale.wire import wire_of

Invoke = Callable[..., tuple[int, str, str]]
RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results"
# The model on paper that this one replaces: no latency, no copies, no optimiser, all-to-all as fast as a ring, and
# FP8 gather that saves 4 bytes an element at 4 TB/s.
ON_PAPER = Assumptions(
    node=10**6,
    latency=0.0,
    tflops=(605, 950),
    at_tokens=None,
    quantise_rate=4e12,
    copy_rate=math.inf,
    optimizer_rate=math.inf,
)
# ms of a step and of communication: BF16; FP8; with FP8 gather; with BF16 reduce; with FP8 reduce.
PAPER = {
    ("8b", 8192, 64): ([681, 444, 431, 423, 420], [198, 198, 155, 105, 81]),
    ("8b", 8192, 512): ([690, 453, 438, 428, 423], [262, 262, 205, 139, 108]),
    ("8b", 2048, 64): ([222, 215, 170, 119, 108], [198, 198, 155, 105, 81]),
    ("8b", 2048, 512): ([287, 280, 222, 154, 121], [262, 262, 205, 139, 108]),
    ("70b", 8192, 64): ([7872, 5095, 4971, 4913, 4885], [1737, 1737, 1316, None, 671]),
    ("70b", 8192, 512): ([7945, 5168, 5026, 4950, 4913], [2301, 2301, 1743, None, 889]),
    ("70b", 2048, 64): ([2137, 1900, 1467, 1260, 1232], [1737, 1737, 1316, None, 671]),
    ("70b", 2048, 512): ([2552, 2468, 1898, 1316, 1260], [2301, 2301, 1743, None, 889]),
}


def case_of(model="8b", mode="full", batch=4, seq=2048, **more):
    return Request(model, mode, batch=batch, seq=seq, **more).case


def every_way():
    return list(_every_way())


def _every_way():
    for mode in ("full", "lora"):
        for strategy in STRATEGIES:
            for recipe in ("block", None):
                case = case_of(mode=mode)
                for way in ways_of(case, strategy, recipe):
                    yield pytest.param(case, strategy, way, id=f"{mode} {strategy} {way.name}")


@pytest.mark.parametrize(("model", "tokens", "gpus"), PAPER)
def test_it_agrees_with_the_model_on_paper(model: str, tokens: int, gpus: int) -> None:
    """Times within 7 %, ratios within 5 %; communication within 5 %: there the root was gathered twice, here once."""
    case = case_of(model, batch=tokens // 2048)
    ways = ways_of(case, "fsdp2")
    kind = "layers" if model == "70b" else "none"
    steps = [plan_step(case, w.with_checkpointing(kind), "fsdp2", gpus, ON_PAPER) for w in (ways[0], *ways[3:])]
    times, communication = PAPER[model, tokens, gpus]
    for step, ms, sent in zip(steps, times, communication, strict=True):
        assert 1e3 * step.seconds == pytest.approx(ms, rel=0.07)
        assert steps[0].seconds / step.seconds == pytest.approx(times[0] / ms, rel=0.05)
        assert sent is None or 1e3 * step.communication == pytest.approx(sent, rel=0.05)


def test_a_root_that_is_gathered_twice_has_the_bytes_on_paper() -> None:
    """8 bytes a parameter with BF16 gather and FP32 reduce; and with FP8 gather 6 a parameter of the layers."""
    case, gpus = case_of(), 64
    ways = ways_of(case, "fsdp2")
    root = (gpus - 1) * units_of(case, ways[0], "fsdp2")[0].gathered_from_rank(gpus)
    share = (gpus - 1) / gpus
    layers = case.layers * persistent.layer_parameters(case)
    plain, fp8 = (wire_of(case, way, "fsdp2", gpus) for way in (ways[3], ways[4]))
    assert plain.gather + plain.reduce + root == pytest.approx(8 * share * persistent.parameters(case), rel=1e-9)
    assert plain.gather - fp8.gather == pytest.approx(2 * share * layers, rel=1e-9)


@pytest.mark.parametrize(("case", "strategy", "way"), every_way())
def test_one_gpu_is_the_plan_of_one_gpu(case, strategy: str, way: Way) -> None:
    assert rank_memory(case, way, strategy, 1) == plan_memory(case, way.option)
    assert wire_of(case, way, strategy, 1).total == 0
    step = plan_step(case, way, strategy, 1, Assumptions())
    assert step.communication == 0 and step.seconds == pytest.approx(step.computing, rel=1e-9)
    if way.option.code != "hf" and way.option.recipe != "block":
        assert way.option in options_of(case, compiled=True, fp8_head=False)


def test_one_gpu_takes_as_long_as_it_was_measured_to() -> None:
    """8,192 tokens of an 8b, without the optimiser."""
    assumed = Assumptions(optimizer_rate=math.inf)
    for mode, name in (("full", "8b-32l"), ("lora", "8b-32l-lora32-peers")):
        rows = {row["name"]: row for row in json.loads((RESULTS / f"2026-11-16-h200-{name}.json").read_text())["rows"]}
        case = case_of(mode=mode)
        for recipe in ("delayed", "channel", "block"):
            if f"octavo {recipe}" not in rows:
                continue
            names = ("bf16-compiled", "octavo-bf16", f"octavo {recipe}")
            for way, row in zip(ways_of(case, "zero3", recipe), names, strict=True):
                seconds = plan_step(case, way, "zero3", 1, assumed).seconds
                measured = case.flops / (1e12 * rows[row]["figures"]["tflops"])
                assert seconds == pytest.approx(measured, rel=1e-3)


def test_rates_are_those_in_the_results() -> None:
    def rates(name: str) -> dict[str, float]:
        rows = json.loads((RESULTS / f"2026-11-16-h200-{name}.json").read_text())["rows"]
        return {row["name"]: row["figures"]["tflops"] for row in rows}

    names = {"hf": "bf16-compiled", "own": "octavo-bf16", "delayed": "octavo delayed", "block": "octavo block"}
    names["channel"] = "octavo channel"
    of_8b = rates("8b-32l")
    for known, measured in (
        (FULL[4096], of_8b),
        (FULL[3072], rates("3b-28l")),
        (LORA, rates("8b-32l-lora32-peers")),
    ):
        assert known == {what: pytest.approx(measured[names[what]], abs=0.06) for what in known}
    of_1b = rates("1b-16l")
    head = of_8b["octavo delayed"] / of_8b["octavo delayed fp8-head"]
    of_1b["octavo delayed"] = of_1b["octavo delayed fp8-head"] * head
    assert FULL[2048] == {what: pytest.approx(of_1b[names[what]], abs=0.06) for what in FULL[2048]}


@pytest.mark.parametrize(("case", "strategy", "way"), every_way())
def test_more_gpus_hold_less_each_and_send_more(case, strategy: str, way: Way) -> None:
    numbers = [1, 2, 4, 8, 16, 64, 128, 512]
    peaks = [rank_memory(case, way, strategy, n).peak.total for n in numbers[1:]]
    sent = [wire_of(case, way, strategy, n).total for n in numbers]
    times = [plan_step(case, way, strategy, n, Assumptions()).communication for n in numbers]
    assert peaks == sorted(peaks, reverse=True)
    assert sent == sorted(sent) and times == sorted(times)
    assert (peaks[0] == peaks[-1]) == (strategy == "ddp")


def test_fewer_bytes_on_the_wire_are_fewer_bytes_and_less_time() -> None:
    """In a node, in the order of the ways; and FP8's reduce is at most 0.27 of FP32's, its gather 0.56 of BF16's."""
    for model in ("8b", "70b"):
        case = case_of(model, batch=1)
        for recipe in ("delayed", "block"):
            ways = ways_of(case, "fsdp2", recipe)[3:]
            steps = [plan_step(case, way, "fsdp2", 8, Assumptions()) for way in ways]
            seconds = [step.seconds for step in steps]
            assert seconds == sorted(seconds, reverse=True)
            assert steps[1].wire.gather <= 0.56 * steps[0].wire.gather
            assert steps[3].wire.reduce <= 0.27 * steps[0].wire.reduce
            assert steps[2].wire.reduce == 0.5 * steps[0].wire.reduce


def test_sharding_is_by_rows_and_padded() -> None:
    assert [Part(32, 4096, 2, True).on_rank(n) for n in (1, 8, 64, 512)] == [32 * 4096, 4 * 4096, 4096, 4096]
    lora = case_of(mode="lora")
    way = ways_of(lora, "fsdp2")[2]
    layer = units_of(lora, way, "fsdp2")[1]
    assert layer.trained == lora.adapter_parameters // lora.layers
    assert 512 * layer.reduced_to_rank(512) > 5 * layer.trained  # 32 rows padded to 512


def test_gathered_units_are_those_of_the_model() -> None:
    for model in ("8b", "1b", "qwen3-0.6b"):  # the last two have tied heads
        for mode in ("full", "lora"):
            case = case_of(model, mode)
            way = ways_of(case, "fsdp2")[0]
            elements = sum(part.elements for unit in units_of(case, way, "fsdp2") for part in unit.parts)
            assert elements == persistent.parameters(case) + case.adapter_parameters


def test_the_parts_of_a_rank() -> None:
    """8b on 64 GPUs, when its last layer goes backward: shards; root and two layers; the head's gradient in FP32."""
    case = case_of()
    way = ways_of(case, "fsdp2")[3]
    one, rank = plan_memory(case, way.option), rank_memory(case, way, "fsdp2", 64)
    before, moment = ({m.name: m for m in memory.moments}["last layer"] for memory in (one, rank))
    vocabulary = persistent.vocabulary_parameters(case)
    gathered = 2 * (vocabulary + 4096) + 2 * 2 * (persistent.layer_parameters(case) + 2 * 4096)
    more = 2 * persistent.parameters(case)  # weights and gradients of shards are in FP32, and need no lower halves
    assert moment.weights == -(-(before.weights + more) // 64) + gathered
    assert moment.gradients == -(-4 * vocabulary // 64) + 4 * vocabulary
    assert moment.states == -(-(before.states - more) // 64)
    assert (moment.activations, moment.buffers) == (before.activations, before.buffers)
    # FP8 gather halves the layers' part; zero3 has two bytes more of masters, and keeps no root.
    smaller = {m.name: m for m in rank_memory(case, ways_of(case, "fsdp2")[4], "fsdp2", 64).moments}["last layer"]
    assert moment.weights - smaller.weights == 2 * persistent.layer_parameters(case)
    zero = {m.name: m for m in rank_memory(case, ways_of(case, "zero3")[2], "zero3", 64).moments}["last layer"]
    assert zero.states == -(-(before.states + 2 * persistent.parameters(case)) // 64)
    assert moment.weights - zero.weights == -(-more // 64) + 2 * (vocabulary + 4096)
    ddp = rank_memory(case, ways_of(case, "ddp")[2], "ddp", 64)
    assert ddp.peak.total == one.peak.total + 2 * persistent.parameters(case)


def test_a_tied_head_keeps_its_gradient() -> None:
    """It is the embedding's, too, which FSDP2 reduces when backward is over."""
    case = case_of("1b")
    memory = rank_memory(case, ways_of(case, "fsdp2")[3], "fsdp2", 8)
    for moment in memory.moments:
        assert moment.gradients >= 2 * persistent.vocabulary_parameters(case)
        assert moment.weights >= 2 * persistent.vocabulary_parameters(case)


def test_the_schedule() -> None:
    """Hidden: the first gather and the last reduce alone are added. Not hidden: communication decides."""
    hidden = [UnitTime(1.0, 2.0, 0.5, 0.5, 0.25)] * 4
    assert step_seconds(hidden, 0.0) == pytest.approx(0.5 + 4 + 0.5 + 8 + 0.25)
    bound = [UnitTime(0.1, 0.2, 1.0, 1.0, 2.0)] * 4
    assert step_seconds(bound, 0.0) == pytest.approx(4 + 0.1 + 4 + 8, rel=0.02)
    assert step_seconds([UnitTime(1.0, 2.0)] * 3, 0.12) == pytest.approx(9.0)
    # Both run all the time but for the ends: each at 0.88.
    even = [UnitTime(1.0, 1.0, 1.0, 1.0, 0.0)] * 50
    # A gather that takes long is not begun before the unit two before it is done.
    late = [UnitTime(1.0, 0.0), UnitTime(1.0, 0.0), UnitTime(0.0, 0.0, 1.5)]
    assert step_seconds(late, 0.0) == pytest.approx(2.5)
    assert step_seconds(even, 0.12) == pytest.approx(100 / 0.88, rel=0.03)
    assert step_seconds(even, 0.0) <= step_seconds(even, 0.12) <= step_seconds(even, 0.3)


def test_bandwidth_is_interpolated_and_an_all_to_all_has_one_card() -> None:
    assumed = Assumptions()
    assert [assumed.bus(n) / 1e9 for n in (2, 8, 64, 512, 4096)] == [370, 370, 320, 245, 245]
    assert 320 < assumed.bus(16) / 1e9 < 370
    assert Assumptions(bandwidth=parse_bandwidth("100")).bus(77) == 100e9
    assert Assumptions(bandwidth=parse_bandwidth("4:200,16:100")).bus(8) == pytest.approx(150e9)
    ring, exchange = assumed.ring_seconds(1e9, 64), assumed.exchange_seconds(1e9, 64)
    assert exchange > 5 * ring
    assert assumed.exchange_seconds(1e9, 8) == assumed.ring_seconds(1e9, 8)
    assert parse_tflops("605,950") == (605.0, 950.0) and parse_gpus("8,64") == (8, 64)


def test_the_choice_is_the_plainest_of_the_fastest() -> None:
    for model, batch in (("8b", 4), ("8b", 1), ("70b", 1)):
        plan = make_scale_plan(ScaleRequest(model, batch=batch))
        for at in plan.at:
            fitting = [row for row in at.rows if row.fits and row.way.option.code != "hf"]
            fastest = min((row.step.seconds for row in fitting), default=0.0)
            near = [row for row in fitting if row.step.seconds <= NEAR * fastest]
            assert at.advice.row is next(iter(near), None)
            assert bool(near) == (model == "8b" or at.gpus > 8)
    # Across nodes an all-to-all has one card a GPU; with a network as fast as rings, FP8 reduce is the fastest.
    at_64 = make_scale_plan(ScaleRequest("8b", (64,), batch=1)).at[0]
    assert at_64.advice.row.way.reduce == "bf16" and "crosses nodes at 48 GB/s" in at_64.advice.why
    fast = ScaleRequest("8b", (64,), batch=1, assumed=Assumptions(network=400))
    assert make_scale_plan(fast).at[0].advice.row.way.reduce == "fp8"


def test_checkpointing_is_for_what_does_not_fit() -> None:
    request = ScaleRequest("70b", (16,), batch=4)
    kinds = {row.way.option.checkpointing for row in rows_of(request, 16)}
    assert kinds == {"layers"}
    for kind in ("none", "layers"):
        rows = rows_of(replace(request, checkpointing=kind), 16)
        assert {row.way.option.checkpointing for row in rows} == {kind}
        assert {row.fits for row in rows} == {kind == "layers"}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_the_command(invoke: Invoke, mode: str, strategy: str) -> None:
    code, output, error = invoke("plan", "8b", "--mode", mode, "--strategy", strategy, "--json", "plan.json")
    assert code == 0 and error == ""
    for gpus in ("8 GPUs: ", "64 GPUs: ", "512 GPUs: "):
        assert f"\n{gpus}FP8 " in output
    assert max(len(line) for line in output.splitlines()) <= 80 and "…" not in output
    assert "Assumed, not measured" in output and "370 on 8, 320 on 64, 245 on 512 GPUs" in " ".join(output.split())
    plan = json.loads(Path("plan.json").read_text())
    assert [at["gpus"] for at in plan["scales"]] == [8, 64, 512] and plan["strategy"] == strategy
    assert plan["assumptions"]["bandwidth"]["8"] == 370 and plan["assumptions"]["in_words"]
    for at in plan["scales"]:
        assert set(at["other_strategies"]) == set(STRATEGIES) - {strategy}
        for way in at["ways"]:
            assert way["sent"]["total"] == pytest.approx(sum(way["sent"][k] for k in ("gather", "reduce", "amax")))
            assert way["peak_gib"] * 2**30 == way["peak"]["total"]


def test_a_model_of_ones_own(invoke: Invoke, tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, output, error = invoke("plan", str(tmp_path / "config.json"), "--gpus", "3", "--batch", "2")
    assert code == 0, error
    assert "\n3 GPUs: " in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpus 0", "--gpus 0: a whole number of at least 1"),
        ("--gpus -8", "--gpus -8: a whole number of at least 1"),
        ("--gpus many", "--gpus many: a number of GPUs, or several such as 8,64,512"),
        ("--gpus 8 --strategy fsdp", "--strategy fsdp: choose one of ddp, fsdp2, zero3"),
        ("--gpus 8 --bandwidth fast", "--bandwidth fast: GB/s such as 370"),
        ("--gpus 8 --bandwidth 0", "--bandwidth 0: a number above 0"),
        ("--gpus 8 --bandwidth 8:370,64", "--bandwidth 8:370,64: GB/s such as 370"),
        ("--gpus 8 --network nan", "--network nan: a number above 0"),
        ("--gpus 8 --slowdown 1", "--slowdown 1: a share from 0 to below 1"),
        ("--gpus 8 --tflops 605", "--tflops 605: two numbers"),
        ("--gpus 8 --gpu b200", "give those of this GPU in TFLOP/s of BF16 and FP8, such as --tflops 605,950"),
        ("--gpus 8 --gpu a100", "--gpu a100: has no FP8 tensor cores"),
        ("--gpus 8 --recipe channel", "--recipe channel: for full fine-tuning on several GPUs, choose one of delayed"),
        ("--gpus 8 --checkpointing some", "checkpointing='some': choose one of none, layers"),
        ("--gpus 8 --mode grpo", "--mode grpo: is planned for one GPU alone"),
        ("--gpus 8 --offload master", "--offload master: is planned for one GPU alone"),
        ("--gpus 8 --no-compile", "--no-compile: is planned for one GPU alone"),
        ("--gpus 8 --all", "--all: is planned for one GPU alone"),
        ("--bandwidth 370", "--bandwidth 370: is of several GPUs; add --gpus"),
        ("--gpus 8 --json /nowhere/plan.json", "a file in a folder that exists"),
    ],
)
def test_what_is_refused(invoke: Invoke, options: str, message: str) -> None:
    code, _, error = invoke("plan", "8b", *options.split())
    assert code == 2 and message in " ".join(error.split())


def test_bdh_is_refused(invoke: Invoke) -> None:
    code, _, error = invoke("plan", "bdh-100m", "--gpus", "8")
    assert code == 2 and "several GPUs are planned for Hugging Face decoders" in " ".join(error.split())


def test_what_does_not_fit_says_what_would(invoke: Invoke) -> None:
    code, _, error = invoke("plan", "70b", "--gpus", "16", "--strategy", "ddp")
    assert code == 2 and "70b does not fit h200. These would fit: --strategy fsdp2." in " ".join(error.split())
    code, _, error = invoke("plan", "70b", "--gpus", "8")
    assert code == 2 and "--gpus 16" in error and "adamw8bit" in error
    code, output, _ = invoke("plan", "70b", "--gpus", "8,64", "--gpu", "h100")  # one of both does
    assert code == 0 and "8 GPUs: nothing fits. These would fit: " in output and "64 GPUs: FP8 " in output
    code, _, error = invoke("plan", "8b", "--gpus", "8", "--batch", "512", "--checkpointing", "none")
    batch = int(error.split("--batch ")[1].split()[0])
    assert code == 2 and 0 < batch < 512
    assert invoke("plan", "8b", "--gpus", "8", "--batch", str(batch), "--checkpointing", "layers")[0] == 0
    code, _, error = invoke("plan", "70b", "--mode", "lora", "--gpus", "2", "--gpu", "8")
    assert code == 2 and "fit" in error
