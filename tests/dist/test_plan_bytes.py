"""The bytes that `octavo plan --gpus` computes, against those that ranks really send: collectives are counted."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo.tools.plan.scale.ways import Way, ways_of
from octavo.tools.plan.scale.wire import wire_of
from octavo.tools.shapes import Case

# Odd sizes: 257 words on 2, 3 and 4 ranks, 3 rows of an adapter, a block of scales that is not full.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 257,
    "tie_word_embeddings": False,
}
RANK = 3
REDUCED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float32}


class Sent(TorchDispatchMode):
    """Counts the bytes that a rank sends, by collective, as rings and direct exchanges send them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.name().removeprefix("c10d::").strip("_")
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            others = distributed.get_world_size() - 1
            if name in ("allgather_base", "reduce_scatter_base"):  # the smaller is a rank's part
                self.bytes[name] += others * min(tensor.nbytes for tensor in tensors[:2])
            elif name == "allreduce":
                self.bytes[name] += 2 * others / (others + 1) * sum(tensor.nbytes for tensor in tensors)
            elif name == "alltoall_base":
                self.bytes[name] += others / (others + 1) * tensors[1].nbytes
            elif name not in ("broadcast", "barrier"):  # of buffers and of DDP's own
                raise AssertionError(f"{name} is not counted")
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def case_of(mode: str, **changes: Any) -> Case:
    frozen = mode == "lora"
    config = {**SIZES, **changes, "model_type": "llama"}
    return Case("tiny", config, config["num_hidden_layers"], 16, 8, 0, "cpu", frozen, RANK if frozen else 0)


def build(way: Way, mode: str, folder: str, **changes: Any) -> Any:
    """A tiny Llama as the way trains it; for LoRA, of the checkpoint in the folder."""
    recipe = way.option.recipe
    if mode == "full":
        model = plain(**changes)
        if recipe:
            octavo.convert_to_fp8(model, recipe)
        return model
    load_in_fp8 = {"load_in_fp8": recipe, "fp8_products": True} if recipe else {}
    model, _ = octavo.FastLanguageModel.from_pretrained(folder, tokenizer=False, **load_in_fp8)
    more = {} if recipe else {"autocast_adapter_dtype": False}
    return octavo.FastLanguageModel.get_peft_model(model, r=RANK, use_gradient_checkpointing=False, **more)


def plain(**changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes})).bfloat16()


def shard(model: Any, way: Way) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=REDUCED[way.reduce])
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for unit in (*base.model.layers, *([] if base.config.tie_word_embeddings else [base.lm_head]), model):
        fully_shard(unit, mp_policy=policy)


@dataclass(frozen=True)
class Job:
    """Something to count: a way in a mode under a strategy, with changes of `SIZES`."""

    mode: str
    strategy: str
    way: Way
    changes: dict[str, Any]

    @property
    def wire(self) -> tuple[Case, Way, str]:
        return case_of(self.mode, **self.changes), self.way, self.strategy


def wrapped(job: Job, folder: str) -> tuple[Any, nn.Module]:
    """The model of a job, and what is called to train it."""
    model = build(job.way, job.mode, folder, **job.changes)
    trained: nn.Module = nn.parallel.DistributedDataParallel(model) if job.strategy == "ddp" else model
    if job.strategy != "ddp":
        shard(model, job.way)
    if job.way.fp8_gather:
        octavo.share_amax(model)
        octavo.fp8_all_gather(model)
    if job.way.reduce == "fp8":
        octavo.reduce_gradients(trained, "fp8")
    return model, trained


def count(rank: int, jobs: list[Job], folder: str) -> list[tuple[dict[str, float], dict[str, int]]]:
    """On a rank: for each job, bytes that it sends in its second step, and numbers of calls, by collective."""
    ids = torch.randint(0, SIZES["vocab_size"], (2, 8), generator=torch.Generator().manual_seed(rank))
    counted = []
    for job in jobs:
        model, trained = wrapped(job, folder)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for _ in range(2):  # in the first, DDP orders its buckets, and ranks agree on names
            with Sent() as sent:
                trained(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        counted.append((sent.bytes, {name: n for name, n in sent.calls.items() if name != "broadcast"}))
    return counted


def jobs_of(world: int) -> list[Job]:
    """Everything on two ranks; on three, where all is uneven, FP8 and LoRA; on four, FSDP2 and DDP."""
    full, lora = case_of("full"), case_of("lora")
    sharded = [way for way in ways_of(full, "fsdp2")[1:] if not way.fp8_gather]
    frozen = [*ways_of(lora, "fsdp2")[1:], ways_of(lora, "fsdp2", "block")[2]]
    jobs = [Job("full", "fsdp2", way, {}) for way in sharded] + [Job("lora", "fsdp2", way, {}) for way in frozen]
    jobs += [Job("full", "ddp", ways_of(full, "ddp")[2], {}), Job("lora", "ddp", ways_of(lora, "ddp")[2], {})]
    jobs += [Job("full", "fsdp2", sharded[2], {"tie_word_embeddings": True})]
    return jobs if world == 2 else jobs[2:6] if world == 3 else [*jobs[1:3], jobs[6]]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_send_what_is_planned(world: int, tmp_path: Path) -> None:
    """Weights in BF16, gradients in FP32 and BF16; of a frozen base one byte an element, and scales; of adapters all.

    Shards are uneven on three ranks, and on four: 257 words, 3 rows of an adapter.
    """
    plain().save_pretrained(tmp_path)
    jobs = jobs_of(world)
    results = on_ranks(world, count, jobs, str(tmp_path))
    assert all(result == results[0] for result in results)
    for job, (sent, calls) in zip(jobs, results[0], strict=True):
        wire = wire_of(*job.wire, world)
        reduced = sent.get("reduce_scatter_base", 0) + sent.get("allreduce", 0)
        assert (sent.get("allgather_base", 0), reduced) == (wire.gather, pytest.approx(wire.reduce, rel=1e-12)), job
        tied = bool(job.changes)
        if job.strategy == "fsdp2":  # the root once, two layers and the head twice; all are reduced that are trained
            trained = 2 if job.mode == "lora" else 3 if tied else 4
            assert calls == {"allgather_base": 5 if tied else 7, "reduce_scatter_base": trained}


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_send_what_is_planned_in_fp8(world: int) -> None:
    """Gathers, reduces and amax. Blocks lie within shards on two ranks, except those of q, k and v; on four none do."""
    full = case_of("full")
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    jobs = [Job("full", "fsdp2", way, {}) for way in ways_of(full, "fsdp2")[4:]]
    jobs += [Job("full", "fsdp2", ways_of(full, "fsdp2", "block")[4], wide)]
    jobs += [Job("full", "ddp", ways_of(full, "ddp")[3], {})]
    results = on_ranks(world, count, jobs, "")
    assert all(result == results[0] for result in results)
    for job, (sent, calls) in zip(jobs, results[0], strict=True):
        wire = wire_of(*job.wire, world)
        if job.strategy == "ddp":  # one bucket here, and not one a unit: parts are rounded up once
            assert sent["allgather_base"] + sent["alltoall_base"] == pytest.approx(wire.reduce, rel=0.02)
            continue
        assert sent["allgather_base"] == wire.gather, job
        assert sent.get("reduce_scatter_base", 0) + sent.get("alltoall_base", 0) == wire.reduce, job
        assert sent["allreduce"] == wire.amax and calls["allreduce"] == 1, job
