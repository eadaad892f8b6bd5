"""Memory of GRPO: rollouts and training steps that take turns on one copy of the weights.

    weights      as in training; a second copy, where an engine has its own, is counted as two
    cache        keys and values of all completions and their prompts, in BF16 or FP8, lengths rounded up to 64
    decoding     weights + optimiser states + cache + FP32 logits of all slots, a few times + adapters in BF16
    prefill      the same, without logits, with the widest tensors of up to 8,192 prompt tokens at once; where FP8
                 weights are multiplied as they are, the largest of them is dequantised
    training     a step of as many whole sequences as `micro_batch_tokens` has room for, and of one at the least;
                 `memory.py` has its moments. Log-probabilities come in chunks of FP32 logits (`rl/loss.py`)
    standby      what is left between two steps, when the engine has given its cache back

With standby, the cache is not there while training: the peak is the largest of the three, not their sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.nn.loss import chunk_bounds
from octavo.rl.loss import CHUNK_BYTES
from octavo.tools.plan import host, persistent
from octavo.tools.plan.gpus import Gpu
from octavo.tools.plan.head import head_bytes
from octavo.tools.plan.memory import plan_memory
from octavo.tools.plan.options import Option, blocks_fit, why_bf16_products
from octavo.tools.plan.timeline import GIB, WORKSPACE, Moment
from octavo.tools.rollouts import BF16, FP32, Size, kv_bytes
from octavo.tools.shapes import Case

ROUND = 64  # tokens to whose multiples the cache's lengths are rounded up (`rl/engine.py`)
PREFILL_TOKENS = 8192  # of prompts that go through the model together (`rl/engine.py`)
LOGITS = (
    4  # tensors of logits' size while a token is chosen: logits, scaled, noise, their difference (`rl/sampling.py`)
)
STRIDE = 64
MOST = 2**17


@dataclass(frozen=True)
class GRPOOption:
    """A way to run GRPO. `copies`: of the weights; 2 where rollouts have an engine with its own."""

    training: Option
    fp8_kv: bool = False
    copies: int = 1

    @property
    def name(self) -> str:
        words = "BF16" if self.training.code == "own" else f"FP8 {self.training.recipe}"
        words += ", FP8 products" if self.training.code == "fp8" and self.training.fp8_products else ""
        words += ", two copies" if self.copies == 2 else ""
        words += ", FP8 cache" if self.fp8_kv else ""
        return words + (", checkpointing" if self.training.checkpointing == "layers" else "")


@dataclass(frozen=True)
class GRPOMemory:
    """Bytes of a run of GRPO, by what is going on. All of them count weights and states."""

    option: GRPOOption
    weights: int
    cache: int
    decoding: int
    prefill: int
    training: int
    standby: int

    @property
    def peak(self) -> int:
        """The peak of a run whose engine frees its cache while the model is trained."""
        return max(self.decoding, self.prefill, self.training)

    @property
    def peak_without_standby(self) -> int:
        return max(self.decoding, self.prefill, self.training + self.cache)

    @property
    def bound_by(self) -> str:
        """The part of a run that its peak belongs to."""
        return max(("decoding", "prefill", "training"), key=lambda name: int(getattr(self, name)))

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, in bytes."""
        sizes = ("weights", "cache", "decoding", "prefill", "training", "standby", "peak", "peak_without_standby")
        option = {**self.option.training.to_dict(), "fp8_kv": self.option.fp8_kv, "copies": self.option.copies}
        return {
            "name": self.option.name,
            "option": option,
            **{name: getattr(self, name) for name in sizes},
            "bound_by": self.bound_by,
        }


def grpo_options(case: Case, gpu: Gpu | None = None) -> list[GRPOOption]:
    """Return the ways that a plan compares, BF16 on one copy first; then the same with checkpointing.

    Forward multiplies activations as they are, unless `--products fp8` asks for more: so training saves them.
    """
    bf16 = Option("own", compiled=False)
    pays = not why_bf16_products(case, gpu)
    recipes = ("channel",) if pays and not blocks_fit(case) else ("channel", "block")
    fp8 = [Option("fp8", recipe, compiled=False, adapter_bytes=FP32, fp8_products=False) for recipe in recipes]
    options = []
    for kind in ("none", "layers"):
        own = replace(bf16, checkpointing=kind)
        options += [GRPOOption(own), GRPOOption(own, copies=2)]
        for each in fp8:
            frozen = replace(each, checkpointing=kind)
            options += [GRPOOption(frozen), GRPOOption(frozen, fp8_kv=True)]
            options += [GRPOOption(replace(frozen, fp8_products=True))] if pays and each is fp8[0] else []
    return options


def cache_bytes(case: Case, size: Size, *, fp8: bool) -> int:
    """Return the bytes of the cache of a rollout."""
    prefix, suffix = (-(-length // ROUND) * ROUND for length in (size.prompt, size.new_tokens))
    return (size.prompts * prefix + size.slots * suffix) * kv_bytes(case, fp8=fp8)


def training_case(case: Case, size: Size, micro_batch_tokens: int) -> Case:
    """Return the case of a micro-batch: whole sequences, at least one."""
    sequences = min(max(micro_batch_tokens // size.length, 1), size.slots)
    return replace(case, tokens=sequences * size.length, seq=size.length)


def plan_grpo(case: Case, option: GRPOOption, size: Size, micro_batch_tokens: int) -> GRPOMemory:
    """Return the memory of a run."""
    training = option.training
    second = persistent.parameters(case) * training.weight_bytes if option.copies == 2 else 0
    weights = persistent.weights(case, training) + second
    states = host.on_gpu(case, training)
    cache = cache_bytes(case, size, fp8=option.fp8_kv)
    copied = case.adapter_parameters * BF16 if training.adapter_bytes != BF16 else 0
    resting = weights + states + cache + copied + WORKSPACE
    logits = LOGITS * size.slots * case.vocabulary * FP32
    return GRPOMemory(
        option,
        weights,
        cache,
        decoding=resting + logits,
        prefill=resting + _prefill_buffers(case, training, size),
        training=_training(training_case(case, size, micro_batch_tokens), training) + second,
        standby=weights + states,
    )


def _prefill_buffers(case: Case, option: Option, size: Size) -> int:
    """Bytes of the tensors around an MLP: the stream, its norm, gate and up, and h."""
    tokens = max(min(size.prompts * size.prompt, PREFILL_TOKENS), size.prompt)
    k, f = case.config["hidden_size"], case.config["intermediate_size"]
    largest = max(linear.n * linear.k for linear in case.linears if linear.name != "head")
    return tokens * (3 * k + 3 * f) * BF16 + (largest * BF16 if option.code == "fp8" else 0)


def _training(case: Case, option: Option) -> int:
    """The peak of a step. Its head is GRPO's: chunks of logits in FP32, of the tokens of completions."""
    memory = plan_memory(case, option)
    head = memory.moments[0]
    rows = case.tokens * int(case.config["hidden_size"]) * option.weight_bytes
    bounds = chunk_bounds(0, case.tokens, case.vocabulary * FP32, CHUNK_BYTES)
    logits = max(stop - start for start, stop in bounds) * case.vocabulary * FP32
    saved = head.activations - head_bytes(case, option)["activations"]
    # The last norm's input and output, and the rows that are predicted from; their gradients, and logits' in BF16.
    own = Moment("head", head.weights, 0, head.states, saved + 3 * rows, logits + logits // 2 + 2 * rows + WORKSPACE)
    return max(moment.total for moment in (own, *memory.moments[1:]))


def longest_completion(case: Case, option: GRPOOption, size: Size, gpu: Gpu) -> int:
    """Return the most new tokens that fit a GPU with standby, micro-batches of one sequence; 0 if none do."""

    def fits(new_tokens: int) -> bool:
        longer = replace(size, new_tokens=new_tokens)
        return plan_grpo(case, option, longer, longer.length).peak <= gpu.room * GIB

    positions = case.config.get("max_position_embeddings") or MOST
    return STRIDE * _most(lambda n: fits(n * STRIDE), (positions - size.prompt) // STRIDE)


def _most(fits: Callable[[int], bool], limit: int) -> int:
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def against_bf16(memories: Sequence[GRPOMemory]) -> list[tuple[float, float]]:
    """Return the peak of each over that of BF16 on one copy, and on two."""
    one = next(memory.peak for memory in memories if memory.option.training.code == "own")
    two = next(memory.peak for memory in memories if memory.option.copies == 2)
    return [(memory.peak / one, memory.peak / two) for memory in memories]
