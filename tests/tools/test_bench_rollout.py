"""`octavo bench --mode rollout` and `--mode grpo`: the floor, the figures, and the commands on a tiny model."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_cases import preset

pytest.importorskip("transformers")
pytest.importorskip("peft")

from octavo.cli.bench import ROLLOUT_AGAINST
from octavo.cli.bench_rollout import ROLLOUT_MODES
from octavo.rl.engine import NativeEngine
from octavo.tools.bench.rollout import runner
from octavo.tools.bench.rollout.floor import DATASHEETS, Rates, floor_of, read_bytes
from octavo.tools.bench.rollout.generators import generator_of
from octavo.tools.bench.rollout.measure import make_prompts, measure
from octavo.tools.bench.rollout.models import prepare
from octavo.tools.bench.rollout.profile import WARM, LiveStep, kernel_lines
from octavo.tools.bench.rollout.result import add_grpo_figures, add_rollout_figures
from octavo.tools.bench.rollout.ways import AGAINST, Way, make_ways
from octavo.tools.bench.rollout.worker import RolloutWorker, serve
from octavo.tools.bench.table import rollout_markdown
from octavo.tools.rollouts import Size, kv_bytes
from octavo.tools.shapes import SHAPES, Case
from octavo.training.errors import UserError

H200 = DATASHEETS["NVIDIA H200"]
SHORT = Size(4, 5, 6, 2)
TINY = ["--preset", "tiny", "--layers", "1", "--device", "cpu", "--rounds", "1", "--new-tokens", "4", "--prompt", "5"]
Bench = Callable[..., tuple[int, str, str]]


def tiny(size: Size = SHORT) -> Case:
    return preset("tiny", layers=1, tokens=size.length, seq=size.length, mode="lora", rank=4)


def eight_billion(rank: int = 0) -> Case:
    return preset("8b", tokens=640, seq=640, mode="lora", rank=rank)


class ProcessHere:
    """In place of `RolloutProcess`: the same worker, told the same by the same JSON, in the process of the test."""

    def __init__(self, case: Case, way: Way, _workers: int) -> None:
        first = json.loads(json.dumps([case.to_dict(), way.to_dict()]))
        self._worker = RolloutWorker(Case.from_dict(first[0]), Way(**first[1]))
        self._asked = []

    def request(self, do: str, **arguments) -> None:
        self._asked.append(json.loads(json.dumps({"do": do, **arguments})))

    def answer(self):
        asked = self._asked.pop(0)
        return json.loads(json.dumps(getattr(self._worker, asked.pop("do"))(**asked)))

    def kill(self) -> None:
        pass


@pytest.fixture
def bench(invoke: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(runner, "RolloutProcess", ProcessHere)
    return lambda *arguments: invoke("bench", *TINY, *arguments)


# Figures of arithmetic done by hand, to three digits: 8B without adapters at 4.8 TB/s, 790 and 1,340 TFLOP/s. A context
# of 512 tokens is a prompt of 256, not shared, and half of 512 new tokens.
GROUPS, CONTEXT_1, CONTEXT_64, CONTEXT_256 = Size(), Size(1, 256, 512, 1), Size(64, 256, 512, 1), Size(256, 256, 512, 1)
BY_HAND = [
    (GROUPS, "block", False, False, 29_800),
    (GROUPS, None, False, False, 17_800),
    (GROUPS, "block", True, False, 33_500),
    (CONTEXT_1, None, False, False, 318),
    (CONTEXT_1, "channel", False, False, 593),
    (CONTEXT_64, None, False, False, 15_900),
    (CONTEXT_64, "channel", False, False, 24_900),
    (CONTEXT_256, None, False, False, 30_300),
    (CONTEXT_256, "block", False, True, 38_900),
    (CONTEXT_256, "block", False, False, 30_300),  # activations as they are: arithmetic is BF16's
    (CONTEXT_256, None, True, False, 38_500),
]


@pytest.mark.parametrize(("size", "recipe", "fp8_kv", "fp8_products", "expected"), BY_HAND)
def test_floors_by_hand(size, recipe, fp8_kv, fp8_products, expected):
    floor = floor_of(eight_billion(), size, H200, recipe=recipe, fp8_kv=fp8_kv, fp8_products=fp8_products)
    # Scales were left out by hand: 4 bytes for 128 of a cache in FP8, which is 3 % of its part.
    assert floor.tokens_per_s == pytest.approx(expected, rel=0.012 if fp8_kv else 0.002)
    assert floor.tokens_per_s <= expected * 1.002
    assert floor.seconds == pytest.approx(size.slots / floor.tokens_per_s)


def test_bytes_of_a_step():
    case = eight_billion(rank=32)
    read = read_bytes(case, GROUPS, recipe=None, fp8_kv=False)
    linears = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    assert read["weights"] == 2 * linears and read["head"] == 2 * 128256 * 4096
    assert read["adapters"] == 2 * 32 * 32 * (7 * 4096 + 14336 - 4096 + 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert kv_bytes(case, fp8=False) == 131_072 and kv_bytes(case, fp8=True) == 131_072 // 2 + 2 * 32 * 8 * 4
    assert read["prefix"] == 8 * 128 * 131_072 and read["suffix"] == 64 * 256 * 131_072
    channel, block = (read_bytes(case, GROUPS, recipe=name, fp8_kv=False)["weights"] for name in ("channel", "block"))
    assert channel == linears + 4 * 32 * (6144 + 4096 + 28672 + 4096) and block == linears + 4 * linears // 128**2
    with_adapters = floor_of(case, GROUPS, H200, recipe="channel")
    assert with_adapters.seconds > floor_of(eight_billion(), GROUPS, H200, recipe="channel").seconds


def test_a_slower_memory_has_a_lower_floor():
    half = floor_of(eight_billion(), CONTEXT_1, replace(H200, tb_per_s=2.4), recipe="block")
    assert half.seconds == pytest.approx(2 * floor_of(eight_billion(), CONTEXT_1, H200, recipe="block").seconds)
    without_fp8 = Rates(4.8, 790.0, None)
    given = {"recipe": "block", "fp8_products": True}
    assert floor_of(eight_billion(), CONTEXT_256, without_fp8, **given).tokens_per_s == pytest.approx(30_300, rel=0.002)


@pytest.mark.parametrize("changes", [{"slots": 0}, {"group": 3}, {"prompt": 0}, {"new_tokens": -1}, {"group": 0}])
def test_sizes_that_cannot_be(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        Size(**{"slots": 4, "group": 2, **changes})


def test_ways():
    ways = make_ways("rollout", ["channel", "block+fp8-kv+fp8-products"], list(AGAINST))
    assert [way.kind for way in ways] == ["generate", "generate_batch", "native", "native", "native"]
    assert ways[-1] == Way("block+fp8-kv+fp8-products", recipe="block", fp8_kv=True, products="fp8")
    assert ways[-1].fp8_products and not ways[-2].fp8_products and not ways[2].fp8_products
    (dgrad,) = make_ways("grpo", ["channel+fp8-dgrad"], [])
    assert dgrad.training == "fp8-dgrad" and dgrad.products == "weights"
    for mode, recipes, against in (
        ("rollout", ["delayed"], []),
        ("rollout", ["channel+weights-only"], []),
        ("rollout", ["channel", "channel"], []),
        ("rollout", [], []),
        ("rollout", [], ["vllm"]),
        ("grpo", [], ["generate"]),
        ("grpo", ["channel+weights-only+fp8-dgrad"], []),
    ):
        with pytest.raises((UserError, ValueError)):
            make_ways(mode, recipes, against)


def test_repeated_names_are_right():
    assert ROLLOUT_AGAINST == AGAINST and ROLLOUT_MODES == runner.MODES


@pytest.mark.parametrize("name", ["generate", "bf16", "channel", "channel+fp8-kv"])
def test_a_measurement(name):
    case, others = tiny(), name in AGAINST
    (way,) = make_ways("rollout", [] if others else [name], [name] if others else [])
    model = prepare(case, way).model
    turn = measure(model, case, way, SHORT, runs=2, peer_tokens=3)
    assert turn["new_tokens"] == (3 if name == "generate" else 6) and len(turn["times"]) == 2
    assert turn["tokens_per_s"] > 0 and turn["prefill_s"] > 0
    assert 0 <= turn["gap"] < 0.05 and 0 <= turn["agreement"] <= 1 and turn["gap_tokens"] > 0
    assert ("trainer_gap" in turn) == (way.recipe is not None)
    if way.is_native:
        assert turn["prefills"] == 2 and turn["cache_bytes"] == (2 * 64 + 4 * 64) * kv_bytes(case, fp8=way.fp8_kv)
    assert turn["peak_gib"] is None and turn["kept"] is None  # of a GPU


def test_the_gap_sees_a_rollout_of_other_weights(monkeypatch):
    case = tiny()
    (way,) = make_ways("rollout", ["channel"], [])
    model = prepare(case, way).model
    honest = measure(model, case, way, SHORT, runs=1)["gap"]
    generate = NativeEngine.generate

    def stale(self, prompts, n, sampling):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(4.0)
            done = generate(self, prompts, n, sampling)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.div_(4.0)
        return done

    monkeypatch.setattr(NativeEngine, "generate", stale)
    assert measure(model, case, way, SHORT, runs=1)["gap"] > 10 * honest


def test_trainers_products_have_another_gap():
    case = tiny()
    (way,) = make_ways("rollout", ["channel"], [])
    turn = measure(prepare(case, way).model, case, way, SHORT, runs=1)
    assert turn["trainer_gap"] > 1.5 * turn["gap"]
    (way,) = make_ways("rollout", ["channel+fp8-products"], [])
    turn = measure(prepare(case, way).model, case, way, SHORT, runs=1)
    assert turn["trainer_gap"] == turn["gap"]


def test_prompts_and_tokens_come_from_the_seed():
    case = tiny()
    prompts = make_prompts(case, SHORT)
    assert prompts == make_prompts(case, SHORT) != make_prompts(replace(case, seed=1), SHORT)
    assert [len(prompt) for prompt in prompts] == [5, 5] and prompts[0] != prompts[1]
    (way,) = make_ways("rollout", [], ["bf16"])
    model = prepare(case, way).model
    first, again = (generator_of(model, way, SHORT, 0).complete(prompts, 2, 6) for _ in range(2))
    assert first == again


def test_kernels_of_a_live_step():
    case = tiny()
    (way,) = make_ways("rollout", ["channel"], [])
    generator = generator_of(prepare(case, way).model, way, SHORT, 0)
    generator.complete(make_prompts(case, SHORT), 2, 6)
    step = LiveStep(generator.engine, 4, 3)
    written = generator.engine._steps
    assert step.seconds(2) > 0 and all(int(each.slots.lengths.max()) == 3 + WARM + 2 for each in written.values())
    kernels = step.kernels()
    attention = next(row for row in kernels if row["name"] == "octavo::decode_attention")
    assert attention["launches"] == case.layers
    lines = kernel_lines(kernels, case.layers, 1.0, most=3)
    assert len(lines) == 5 and "for each of 1 layers" in lines[0] and "more" in lines[-1]
    generator.complete(make_prompts(case, SHORT), 2, 6)  # the engine works on


def test_figures_of_rollouts():
    case = eight_billion()
    turns = {"generate": (1000.0, 64), "bf16": (10_000.0, 512), "channel": (17_000.0, 512)}
    rows = []
    for name, (rate, tokens) in turns.items():
        (way,) = make_ways("rollout", [] if name in AGAINST else [name], [name] if name in AGAINST else [])
        turn = {"tokens_per_s": rate, "step_s": 64 / rate, "prefill_s": 0.1, "new_tokens": tokens}
        rows.append({"name": name, "way": way.to_dict(), "size": GROUPS.to_dict(), "status": "timed", "turn": turn})
    rows.append({"name": "block", "size": GROUPS.to_dict(), "status": "failed", "reason": "out of memory"})
    add_rollout_figures(rows, case, replace(H200, tb_per_s=4.25), "NVIDIA H200")
    figures = {row["name"]: row["figures"] for row in rows if "figures" in row}
    assert figures["channel"]["speedup_bf16"] == 1.7 and figures["channel"]["speedup_generate"] == 17
    assert figures["channel"]["speedup_generate_batch"] is None
    assert figures["channel"]["datasheet_share"] == pytest.approx(17_000 / 29_800, rel=0.002)
    assert figures["channel"]["floor_share"] == pytest.approx(17_000 / 29_800 * 4.8 / 4.25, rel=0.002)
    assert figures["channel"]["step_share"] == pytest.approx(figures["channel"]["floor_share"])
    # Fewer tokens have a shorter cache, so another floor.
    assert figures["generate"]["floor"]["bytes"]["suffix"] == 64 * 32 * 131_072


def test_figures_of_grpo():
    def row(name, step, peak):
        turn = {"times": [step], "rollout_s": step / 2, "train_s": step / 2, "peak_gib": peak}
        turn |= dict.fromkeys(("gap_mean", "gap_p99", "gap_clip"), 0.0)
        return {"name": name, "size": GROUPS.to_dict(), "status": "timed", "turn": turn, "weights_gib": 15.0}

    rows = [row("bf16", 6.0, 45.0), row("channel", 4.0, 21.0)]
    add_grpo_figures(rows)
    figures = rows[1]["figures"]
    assert figures["speedup_step_s"] == 1.5 and figures["memory"] == pytest.approx(21 / 45)
    assert figures["memory_two_copies"] == pytest.approx(21 / 60)
    alone = [row("channel", 4.0, None)]
    add_grpo_figures(alone)
    assert alone[0]["figures"]["memory"] is None and alone[0]["figures"]["speedup_step_s"] is None


def test_the_command(bench: Bench, tmp_path: Path):
    code, output, error = bench(
        "--mode", "rollout", "--slots", "4,1", "--against", "generate,bf16", "--recipe", "channel",
        "--peer-tokens", "2", "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 0 and error == "" and "of the floor" in output and "generate (2 tokens)" in output
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-rollout.json")
    result = json.loads(path.read_text())
    assert result["kind"] == "rollout" and "flops" not in result
    assert [(row["name"], row["size"]["slots"]) for row in result["rows"]] == [
        (name, slots) for name in ("generate", "bf16", "channel") for slots in (4, 1)
    ]
    assert all(row["status"] == "timed" and row["weights_gib"] > 0 for row in result["rows"])
    text = rollout_markdown([result])
    assert text.count("\n|") == 2 + 6 and "| channel | 4 |" in text and "octavo bench" in text
    assert "prompts of 5 in groups of 1 and 2;" in text


def test_the_command_for_grpo(bench: Bench, tmp_path: Path):
    code, output, error = bench("--mode", "grpo", "--recipe", "channel+fp8-dgrad,block", "--out", str(tmp_path))
    assert code == 0 and error == "" and "training s" in output
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert result["kind"] == "grpo" and result["rollout"]["mini_batches"] == 2
    assert [row["name"] for row in result["rows"]] == ["bf16", "channel+fp8-dgrad", "block"]
    for row in result["rows"]:
        assert row["figures"]["step_s"] > 0 and row["figures"]["speedup_step_s"] > 0
    gaps = {row["name"]: row["figures"]["gap_mean"] for row in result["rows"]}
    assert gaps["channel+fp8-dgrad"] < gaps["block"]  # of weights alone against FP8 products
    assert "| block |" in rollout_markdown([result])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "rollout", "--tokens", "64"], "--tokens 64"),
        (["--mode", "rollout", "--gemm"], "--gemm"),
        (["--mode", "rollout", "--rank", "0"], "--rank 0"),
        (["--mode", "rollout", "--slots", "four"], "--slots four"),
        (["--mode", "rollout", "--slots", "6", "--group", "4"], "group=4"),
        (["--mode", "rollout", "--standby"], "--standby: is of --mode grpo"),
        (["--mode", "rollout", "--no-standby"], "--no-standby: is of --mode grpo"),
        (["--mode", "rollout", "--preset", "bdh-tiny"], "--preset bdh-tiny: --mode rollout is of Hugging Face"),
        (["--mode", "rollout", "--prompt", "2100"], "--prompt 2100 --new-tokens 16: tiny has 2048 positions"),
        (["--mode", "rollout", "--prompt", "-1"], "--prompt=-1: a whole number"),
        (["--mode", "rollout", "--new-tokens", "0"], "--new-tokens=0: a whole number"),
        (["--mode", "rollout", "--group", "-2"], "--group=-2: a whole number"),
        (["--mode", "rollout", "--peer-tokens", "0"], "--peer-tokens=0: a whole number"),
        (["--mode", "grpo", "--mini-batches", "0"], "--mini-batches=0: a whole number"),
        (["--mode", "grpo", "--micro-batch-tokens", "-1"], "--micro-batch-tokens=-1: a whole number"),
        (["--mode", "grpo", "--rounds", "0"], "--rounds=0: a whole number"),
        (["--mode", "grpo", "--peer-tokens", "3"], "--peer-tokens 3"),
        (["--mode", "grpo", "--slots", "4,8"], "--slots 4,8"),
        (["--mode", "rollout", "--recipe", "none", "--against", "none"], "nothing to run"),
        (["--mode", "lora", "--group", "2"], "--group 2"),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else "",
)
def test_what_is_refused(invoke: Bench, arguments, message):
    given = ["--preset", "tiny", "--device", "cpu", *arguments]
    code, _, error = invoke("bench", *given)
    assert code != 0 and message in error and len(error.strip().splitlines()) == 1


def test_a_way_that_fails_leaves_the_others(bench: Bench, tmp_path: Path, monkeypatch):
    answer = ProcessHere.answer

    def failing(self):
        if self._worker.way.name == "bf16":
            raise runner.WorkerError("out of memory in /home/somebody/file.py")
        return answer(self)

    monkeypatch.setattr(ProcessHere, "answer", failing)
    code, output, _ = bench(
        "--mode", "rollout", "--against", "bf16", "--recipe", "channel", "--out", str(tmp_path / "x.json")
    )
    result = json.loads((tmp_path / "x.json").read_text())
    assert code == 0 and [row["status"] for row in result["rows"]] == ["failed", "timed"]
    assert "somebody" not in json.dumps(result) and "out of memory" in output


def test_the_positions_of_a_configuration(invoke: Bench, tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SHAPES["tiny"], "max_position_embeddings": 32}))
    arguments = ["--config", str(path), "--device", "cpu", "--mode", "grpo", "--prompt", "30", "--new-tokens", "4"]
    code, _, error = invoke("bench", *arguments)
    assert code == 2 and "--prompt 30 --new-tokens 4: config has 32 positions" in error


@pytest.mark.parametrize("mode", ROLLOUT_MODES)
def test_no_way_that_works_is_an_error(mode: str, bench: Bench, tmp_path: Path, monkeypatch):
    def failing(_):
        raise runner.WorkerError("out of memory")

    monkeypatch.setattr(ProcessHere, "answer", failing)
    path = tmp_path / "x.json"
    code, output, error = bench("--mode", mode, "--against", "bf16", "--recipe", "channel", "--out", str(path))
    assert code == 1 and "out of memory" in output and f"no contender was timed; {path} says why" in error
    assert [row["reason"] for row in json.loads(path.read_text())["rows"]] == ["out of memory"] * 2


def test_a_worker_answers_in_json():
    (way,) = make_ways("rollout", [], ["bf16"])
    lines = [
        {"case": tiny().to_dict(), "way": way.to_dict()},
        {"do": "start"},
        {"do": "load"},
        {"do": "rollout", "size": SHORT.to_dict(), "runs": 1, "peer_tokens": None},
        {"do": "rollout", "size": {"slots": 3, "group": 2}, "runs": 1, "peer_tokens": None},
    ]
    answers = io.StringIO()
    serve(io.StringIO("".join(json.dumps(line) + "\n" for line in lines)), answers)
    started, loaded, turn, failed = (json.loads(line) for line in answers.getvalue().splitlines())
    assert started == {} and loaded["weights_gib"] > 0 and turn["tokens_per_s"] > 0 and "group=2" in failed["error"]
