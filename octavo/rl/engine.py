"""The native engine: rollouts by the trainer's own modules, on a cache that is the only memory of its own.

    engine = NativeEngine(model)
    completions = engine.generate(prompts, n=8, sampling=Sampling(max_new_tokens=512))

    prefill   each distinct prompt once, packed in one row, into `prefix[place]`; its last hidden state is kept
    start     a free slot samples the first token of a completion from that state
    step      one token for all slots (`slots.py`): a CUDA graph on a GPU, as it is elsewhere
    refill    a slot that has ended gets the next completion; a place whose completions are complete the next prompt

A graph is recorded for each number of slots (and of slots that share a prompt). It is valid as long as the cache, the
copies of weights and the modules are where they were (`decoders/graph_state.py`). `standby` frees the cache and the
graphs with it, and the next rollout records them again: that costs a few steps' time, and no address has to outlive its
memory.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.numerics.checks import check_choice, check_positive_int
from octavo.rl.cache import KV_DTYPES, CacheSize, Prefill, RolloutCache
from octavo.rl.checks import check_finite, check_prompts, check_sampling, check_stops
from octavo.rl.completions import Completion, Sampling
from octavo.rl.policy import PRODUCTS, Policy
from octavo.rl.sampling import choose
from octavo.rl.schedule import Schedule
from octavo.rl.slots import Slots
from octavo.rl.step import Recorder, Step
from octavo.rl.stops import StopTexts

_ROUND = 64  # positions are rounded up to it, so that a slightly longer prompt needs no other cache
_STRIDE = 8  # steps between two looks at which slots have ended: each waits for the GPU
_PREFILL_TOKENS = 8192  # of prompts that go through the model together


class NativeEngine:
    """Completes prompts with a causal language model that a trainer owns.

    `model`: of a family that Octavo knows, with or without PEFT's LoRA, in FP8 or not. `slots`: completions that are
    written at once. `max_length`: tokens of a prompt and its completion together, at most; None: the model's positions.
    `kv_dtype`: "auto" keeps keys and values in the dtype of the model, "fp8" in E4M3 with a scale for each token and
    head. `products`: "weights" multiplies activations as they are with FP8 weights, which is closest to a trainer
    whatever its products are; "fp8" keeps the model's own. `exact_logprobs`: refuse top-k and top-p, with which the
    log-probabilities are not those that were sampled from. `memory_share`: of the device's memory, for everything
    together with the cache. `graphs`: record steps as CUDA graphs; None: on a GPU.
    """

    name = "native"

    def __init__(
        self,
        model: Any,
        *,
        slots: int = 64,
        max_length: int | None = None,
        kv_dtype: str = "auto",
        products: str = "weights",
        exact_logprobs: bool = False,
        memory_share: float = 0.95,
        graphs: bool | None = None,
    ) -> None:
        check_positive_int("slots", slots)
        if max_length is not None:
            check_positive_int("max_length", max_length)
        check_choice("kv_dtype", kv_dtype, KV_DTYPES)
        check_choice("products", products, PRODUCTS)
        if not 0 < memory_share <= 1:
            raise ValueError(f"memory_share={memory_share!r}: a share of the memory, above 0 to 1")
        self.policy = Policy(model)
        self.slots, self.kv_dtype, self.products, self.exact_logprobs = slots, kv_dtype, products, exact_logprobs
        positions = self.policy.positions
        if max_length is not None and positions is not None and max_length > positions:
            raise ValueError(f"max_length={max_length}: the model has {positions} positions")
        self.max_length = max_length if max_length is not None else positions
        self.memory_share = memory_share
        self._wants_graphs = graphs
        if graphs and self.policy.device.type != "cuda":
            raise ValueError(f"graphs=True: the model is on {self.policy.device}; CUDA graphs are for a GPU")
        self._cache: RolloutCache | None = None
        self._size: CacheSize | None = None
        self._hidden: Tensor | None = None
        self._steps: dict[tuple[int, int], Step] = {}
        self._recorded: list[Any] = []  # the state of the modules that graphs were recorded of
        self._recorder: Recorder | None = None
        self._generator = torch.Generator(self.policy.device)
        self._statistics: dict[str, float] = {}

    @property
    def graphs(self) -> bool:
        """Whether steps are CUDA graphs."""
        return self.policy.device.type == "cuda" and self._wants_graphs is not False

    @property
    def _stride(self) -> int:
        return _STRIDE if self.policy.device.type == "cuda" else 1

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Completion]:
        """Complete each prompt n times with the weights as they are now, in the order of the prompts."""
        with self.policy.lock:  # the cache and the slots are of one call
            return self._generate(prompts, n, sampling)

    def _generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Completion]:
        check_positive_int("n", n)
        given = _as_ints(prompts)
        check_sampling(sampling, self.exact_logprobs)
        self._follow()
        check_prompts(given, self.policy, self.max_length)
        if not given:
            self._statistics = {"prefills": 0.0, "tokens": 0.0, "seconds": 0.0}
            return []
        started = time.perf_counter()
        limits = [self._limit(prompt, sampling) for prompt in given]
        schedule = Schedule(given, limits, n, slots=self.slots)
        stop_ids = self.policy.stop_ids() if sampling.stop_ids is None else sampling.stop_ids
        check_stops(stop_ids, self.policy)
        with self.policy.rollout(self.products):
            self._make_room(schedule.size(_ROUND))
            step = self._step(schedule.slots, schedule.together)
            step.slots.reset(stop_ids, sampling.temperature)
            if self.graphs:
                self._record(step, sampling)
            self._generator.manual_seed(_seed(sampling))
            steps = self._run(schedule, step, sampling)
        done = schedule.completions()
        check_finite(done)
        no_stops = not stop_ids and sampling.stop_texts is None
        self._note(schedule, done, steps, time.perf_counter() - started, no_stops)
        return done

    def standby(self) -> None:
        """Free the cache, the recorded graphs and the copies of weights; the memory goes back to the device."""
        with self.policy.lock:
            if self._cache is not None:
                self._size = self._cache.size
            self._cache = self._hidden = None
            self._steps.clear()
            self._recorded, self._recorder = [], None
            self.policy.release()
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Allocate the cache again, as large as it was. Graphs are recorded by the next rollout."""
        with self.policy.lock:
            if self._cache is None and self._size is not None:
                self._make_room(self._size)

    def statistics(self) -> dict[str, float]:
        """Figures of the last `generate`.

        `prefills`: prompts that went through the model; `prompt_tokens`; `tokens`: generated; `seconds`;
        `tokens_per_second`; `steps`; `stopped`: the share of completions that a stop ended; `no_stop_ids`: 1 if no stop
        was known, so that completions end by length alone; `slots`; `cache_bytes`.
        """
        return dict(self._statistics)

    def _run(self, schedule: Schedule, step: Step, sampling: Sampling) -> int:
        """Fill slots and step until all is complete. Returns how many steps it took."""
        steps = 0
        while True:
            self._refill(schedule, step.slots, sampling)
            busy = schedule.busy
            if not busy:
                return steps
            if sampling.stop_texts is not None:
                _cut(step.slots, busy, sampling.stop_texts, self._stride)
            ended = step.slots.ended(busy)
            if ended:
                schedule.finish(ended, step.slots.read(ended))
                continue
            for _ in range(self._stride):
                step.run(sampling)
            steps += self._stride

    def _refill(self, schedule: Schedule, slots: Slots, sampling: Sampling) -> None:
        """Give free slots their next completions, and free places the prompts of those."""
        fresh, begun = schedule.refill()
        assert self._hidden is not None
        for batch in _batches(fresh):
            places = [place for place, _ in batch]
            self._hidden[torch.tensor(places, device=self.policy.device)] = self._prefill(batch)
        if begun:
            places = [place for _, place, _ in begun]
            hidden = self._hidden[torch.tensor(places, device=self.policy.device)]
            first = choose(self.policy.logits(hidden), sampling, slots.temperature, self._generator)
            slots.start([slot for slot, _, _ in begun], places, [limit for _, _, limit in begun], first)
            slots.set_groups(schedule.members(self._cache_size().places))

    def _prefill(self, batch: Sequence[tuple[int, list[int]]]) -> Tensor:
        """Put prompts into their places. Returns the hidden state of the last token of each."""
        assert self._cache is not None
        device = self.policy.device
        attends = Prefill(self._cache, [len(p) for _, p in batch], [place for place, _ in batch], device)
        ids = torch.tensor([token for _, prompt in batch for token in prompt], device=device)
        hidden = self.policy.hidden(attends, ids[None], attends.positions.long()[None])[0]
        return hidden[attends.offsets[1:].long() - 1]

    def _step(self, count: int, together: int) -> Step:
        key = (count, together)
        if key not in self._steps:
            assert self._cache is not None
            slots = Slots(count, together, self._cache, self.policy.vocabulary, self.policy.device)
            self._steps[key] = Step(self.policy, slots, self._generator)
        return self._steps[key]

    def _record(self, step: Step, sampling: Sampling) -> None:
        """Record a graph where there is none. Those of modules that have changed since are dropped: other adapters."""
        state = self.policy.state()
        if state != self._recorded:
            for each in self._steps.values():
                each.forget()
            self._recorded = state
        if self._recorder is None:
            self._recorder = Recorder(self.policy.device)
        complete = False
        try:
            step.record(sampling, self._recorder)
            complete = True
        finally:
            if not complete:  # the generator waits for the end of a recording that broke off
                self._steps.clear()
                self._generator, self._recorder = torch.Generator(self.policy.device), None

    def _follow(self) -> None:
        """Start anew where the model was moved or cast, or has other layers or tokens, since the last rollout."""
        policy = self.policy
        place, tokens, layers = policy.place(), policy.tokens(), policy.layers()
        if (*place, tokens, layers) != (policy.device, policy.dtype, policy.vocabulary, policy.attentions):
            self.standby()
            policy.attentions = layers
            policy.device, policy.dtype = place
            policy.vocabulary = tokens
            self._generator = torch.Generator(policy.device)

    def _cache_size(self) -> CacheSize:
        assert self._cache is not None
        return self._cache.size

    def _make_room(self, size: CacheSize) -> None:
        """Allocate a cache, unless there is one that is large enough."""
        if self._cache is not None and self._cache.size.covers(size):
            return
        if self._cache is not None:
            size = size.joined(self._cache.size)
            self._cache = self._hidden = None
            self._steps.clear()
        form = self.policy.cache_format(self.kv_dtype)
        device = self.policy.device
        needed, room = size.tokens * form.bytes_per_token, _room(device, self.memory_share)
        if needed > room:
            raise ValueError(
                f"a cache of {size.slots} slots of {size.suffix} tokens and {size.places} prompts of {size.prefix} "
                f"takes {needed / 2**30:.2f} GiB, and {room / 2**30:.2f} GiB are free on {device} "
                f"(memory_share={self.memory_share}): lower slots={self.slots}, max_length={self.max_length} or "
                f"max_new_tokens, or set kv_dtype='fp8' (now {self.kv_dtype!r})"
            )
        with torch.inference_mode(False):
            self._cache = RolloutCache(size, form, device)
            self._hidden = torch.zeros(size.places, self.policy.hidden_size, dtype=self.policy.dtype, device=device)

    def _limit(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """How many tokens a completion of this prompt may have."""
        longest = sampling.max_new_tokens
        return longest if self.max_length is None else min(longest, self.max_length - len(prompt))

    def _note(self, schedule: Schedule, done: Sequence[Completion], steps: int, seconds: float, no_stops: bool) -> None:
        assert self._cache is not None
        tokens = sum(len(completion.tokens) for completion in done)
        self._statistics = {
            "prefills": float(schedule.prefills),
            "prompt_tokens": float(schedule.prompt_tokens),
            "tokens": float(tokens),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "steps": float(steps),
            "stopped": sum(completion.stopped for completion in done) / len(done),
            "no_stop_ids": float(no_stops),
            "slots": float(schedule.slots),
            "cache_bytes": float(self._cache.nbytes),
        }


def _cut(slots: Slots, busy: Sequence[int], texts: StopTexts, new: int) -> None:
    """End completions that have come upon a stop text in their last `new` tokens."""
    latest = slots.latest(busy, new + texts.reach)
    found = [slot for slot, tokens in zip(busy, latest, strict=True) if texts.are_in(tokens)]
    if not found:
        return
    whole = slots.latest(found, slots.longest)
    ends = {slot: texts.end(tokens, new) for slot, tokens in zip(found, whole, strict=True)}
    cut = {slot: end for slot, end in ends.items() if end is not None}
    if cut:
        slots.cut(list(cut), list(cut.values()))


def _batches(fresh: Sequence[tuple[int, list[int]]]) -> list[list[tuple[int, list[int]]]]:
    """Prompts with their places, as many together as `_PREFILL_TOKENS` allow, and at least one."""
    batches: list[list[tuple[int, list[int]]]] = []
    tokens = _PREFILL_TOKENS
    for place, prompt in fresh:
        tokens += len(prompt)
        if tokens > _PREFILL_TOKENS:
            batches.append([])
            tokens = len(prompt)
        batches[-1].append((place, prompt))
    return batches


def _as_ints(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    try:
        return [[_as_int(token) for token in prompt] for prompt in prompts]
    except TypeError as error:
        raise ValueError(f"prompts: a list of lists of tokens, such as [[1, 15, 27]]; {error}") from error


def _as_int(token: Any) -> Any:
    """The token as an int, if it is an integer of NumPy's or torch's; anything else as it is."""
    return token.__index__() if hasattr(token, "__index__") and not isinstance(token, float) else token


def _seed(sampling: Sampling) -> int:
    return sampling.seed if sampling.seed is not None else int(torch.randint(2**63 - 1, (), device="cpu"))


def _room(device: torch.device, share: float) -> float:
    """Bytes that a cache may take: what is free, less the share of the memory that is to stay so."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached - (1 - share) * total
    return share * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
