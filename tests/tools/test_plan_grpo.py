"""`octavo plan --mode grpo`: the cache, rollouts and training on one copy of the weights."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from bench_cases import preset

from octavo.rl import engine
from octavo.tools.plan import grpo
from octavo.tools.plan.gpus import Gpu
from octavo.tools.plan.grpo import GRPOOption, cache_bytes, grpo_options, longest_completion, plan_grpo
from octavo.tools.plan.grpo_run import GRPORequest, make_grpo_plan
from octavo.tools.plan.memory import plan_memory
from octavo.tools.plan.options import Option
from octavo.tools.plan.timeline import GIB
from octavo.tools.rollouts import Size, kv_bytes
from octavo.training.errors import UserError

Invoke = Callable[..., tuple[int, str, str]]
CASE = GRPORequest("8b").case
SIZE = Size()
BF16 = GRPOOption(Option("own", compiled=False))
FP8 = GRPOOption(Option("fp8", "channel", compiled=False, adapter_bytes=4))


def test_numbers_of_the_engine_are_repeated():
    assert grpo.ROUND == engine._ROUND and grpo.PREFILL_TOKENS == engine._PREFILL_TOKENS


def test_the_cache_by_hand():
    tokens = 8 * 128 + 64 * 512
    assert cache_bytes(CASE, SIZE, fp8=False) == tokens * 2 * 32 * 8 * 128 * 2
    assert cache_bytes(CASE, SIZE, fp8=True) == tokens * 2 * 32 * 8 * (128 + 4)
    uneven = Size(6, 65, 1, 3)
    assert cache_bytes(CASE, uneven, fp8=False) == (2 * 128 + 6 * 64) * kv_bytes(CASE, fp8=False)


@pytest.mark.parametrize("fp8", [False, True])
def test_the_cache_is_the_engines(fp8):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from octavo.tools.bench.rollout.generators import generator_of
    from octavo.tools.bench.rollout.measure import make_prompts
    from octavo.tools.bench.rollout.models import prepare
    from octavo.tools.bench.rollout.ways import make_ways

    size = Size(4, 70, 3, 2)
    case = preset("tiny", layers=1, tokens=size.length, seq=size.length, mode="lora", rank=4)
    (way,) = make_ways("rollout", ["channel+fp8-kv" if fp8 else "channel"], [])
    generator = generator_of(prepare(case, way).model, way, size, 0)
    generator.complete(make_prompts(case, size), 2, 3)
    assert generator.statistics()["cache_bytes"] == cache_bytes(case, size, fp8=fp8)


def test_parts_add_up():
    memory = plan_grpo(CASE, FP8, SIZE, 8192)
    assert memory.peak == max(memory.decoding, memory.prefill, memory.training)
    assert memory.peak_without_standby == max(memory.decoding, memory.prefill, memory.training + memory.cache)
    assert memory.standby + memory.cache < memory.decoding and memory.bound_by == "training"
    smaller = plan_grpo(CASE, replace(FP8, fp8_kv=True), SIZE, 8192)
    assert memory.decoding - smaller.decoding == memory.cache - smaller.cache > 0.45 * memory.cache
    assert smaller.training == memory.training


def test_two_copies_count_the_weights_again():
    one, two = (plan_grpo(CASE, replace(BF16, copies=copies), SIZE, 8192) for copies in (1, 2))
    weights = 2 * 8_030_261_248
    for name in ("weights", "decoding", "prefill", "training", "standby", "peak"):
        assert getattr(two, name) - getattr(one, name) == weights


def test_micro_batches_are_whole_sequences():
    for tokens, sequences in ((8192, 12), (640, 1), (1, 1), (10**9, 64)):
        case = grpo.training_case(CASE, SIZE, tokens)
        assert (case.tokens, case.seq) == (sequences * 640, 640)


def test_training_is_that_of_lora_but_for_the_head():
    memory = plan_memory(CASE, FP8.training)
    other = max(moment.total for moment in memory.moments if moment.name != "head")
    assert plan_grpo(CASE, FP8, SIZE, 8192).training >= other
    # With many layers what they save is the peak; with one, GRPO's head and its FP32 logits are.
    shallow = replace(CASE, layers=1)
    few = plan_grpo(shallow, FP8, SIZE, 8192).training
    assert few > max(moment.total for moment in plan_memory(shallow, FP8.training).moments if moment.name != "head")


def test_longest_completions():
    gpu = Gpu("24", 24.0, (9, 0))
    size = Size(8, 128, 512, 8)
    for option in (BF16, FP8, replace(FP8, fp8_kv=True)):
        longest = longest_completion(CASE, option, size, gpu)
        fitting, too_long = (replace(size, new_tokens=longest + more) for more in (0, 64))
        assert plan_grpo(CASE, option, fitting, 1).peak <= gpu.room * GIB < plan_grpo(CASE, option, too_long, 1).peak
    assert longest_completion(CASE, replace(BF16, copies=2), size, gpu) == 0
    assert longest_completion(CASE, FP8, size, Gpu("huge", 10_000.0, (9, 0))) == (131072 - 128) // 64 * 64


def test_options():
    names = [option.name for option in grpo_options(CASE)]
    fp8 = ["FP8 channel", "FP8 channel, FP8 cache", "FP8 channel, FP8 products"]
    assert names[:5] == ["BF16", "BF16, two copies", *fp8]
    assert len(names) == len(set(names)) == 14 and names[-1] == "FP8 block, FP8 cache, checkpointing"
    tiny = GRPORequest("tiny", slots=4, prompt=16, new_tokens=16, group=2).case
    assert all(not option.training.fp8_products for option in grpo_options(tiny) if option.training.code == "fp8")


@pytest.mark.parametrize("model", ["tiny", "135m", "8b", "qwen3-8b"])
@pytest.mark.parametrize("more", [[], ["--gpu", "24"]], ids=["", "gpu"])
def test_the_command(invoke: Invoke, tmp_path: Path, model: str, more: list[str]):
    path = tmp_path / "plan.json"
    code, output, error = invoke("plan", model, "--mode", "grpo", "--json", str(path), *more)
    assert code == 0 and error == "" and "BF16, two copies" in output
    assert max(len(line) for line in output.splitlines() if "plan.json" not in line) <= 80 and "…" not in output
    assert ("longest" in output) == bool(more)
    figures = json.loads(path.read_text())
    assert figures["options"][0]["of_bf16"] == 1 and figures["options"][1]["of_two_copies"] == 1
    assert figures["options"][0]["peak"] == make_grpo_plan(GRPORequest(model)).memories[0].peak


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["8b", "--mode", "grpo", "--batch", "2"], "--batch 2"),
        (["8b", "--mode", "grpo", "--no-compile"], "--no-compile: --mode grpo has none"),
        (["8b", "--mode", "lora", "--slots", "8"], "--slots 8"),
        (["8b", "--mode", "grpo", "--slots", "6", "--group", "4"], "group=4"),
        (["8b", "--mode", "grpo", "--group", "0"], "group=0: a whole number"),
        (["8b", "--mode", "grpo", "--group", "-2"], "group=-2: a whole number"),
        (["8b", "--mode", "grpo", "--micro-batch-tokens", "0"], "micro_batch_tokens"),
        (["tiny", "--mode", "grpo", "--new-tokens", "4000"], "2048 positions"),
        (["bdh-tiny", "--mode", "grpo"], "bdh-tiny"),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else "",
)
def test_what_is_refused(invoke: Invoke, arguments, message):
    code, _, error = invoke("plan", *arguments)
    assert code != 0 and message in error and len(error.strip().splitlines()) == 1


def test_a_request_is_checked():
    with pytest.raises(ValueError, match="slots"):
        GRPORequest("8b", slots=0)
    with pytest.raises(UserError, match="neither a file"):
        GRPORequest("9b")
