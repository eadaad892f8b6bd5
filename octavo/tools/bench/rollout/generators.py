"""The ways to complete prompts: Octavo's engine and transformers' two, behind one method.

No completion ends early: no token stops one. Tokens are sampled at temperature 1 from the whole vocabulary, or chosen
greedily.
"""

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from octavo.rl.completions import Completion, Sampling
from octavo.rl.engine import NativeEngine
from octavo.tools.bench.rollout.ways import Way
from octavo.tools.rollouts import Size

Prompts = Sequence[Sequence[int]]


class Generator(Protocol):
    """Something that completes prompts."""

    def complete(
        self, prompts: Prompts, n: int, new_tokens: int, *, greedy: bool = False, logprobs: bool = False
    ) -> list[Completion]:
        """Complete each prompt n times. `logprobs`: asked for; where they cost nothing they come anyway."""
        ...

    def statistics(self) -> dict[str, float]: ...

    def standby(self) -> None:
        """Free what can be freed."""
        ...


def generator_of(model: Any, way: Way, size: Size, seed: int) -> Generator:
    """Return the generator of a way, for rollouts of this size."""
    if way.kind == "generate":
        return Generate(model, seed)
    if way.kind == "generate_batch":
        return GenerateBatch(model, size, seed)
    return Native(model, way, size, seed)


class Native:
    """Octavo's engine."""

    def __init__(self, model: Any, way: Way, size: Size, seed: int) -> None:
        kv_dtype = "fp8" if way.fp8_kv else "auto"
        self.engine = NativeEngine(
            model, slots=size.slots, max_length=size.length, kv_dtype=kv_dtype, products=way.products
        )
        self._seed = seed

    def complete(
        self,
        prompts: Prompts,
        n: int,
        new_tokens: int,
        *,
        greedy: bool = False,
        logprobs: bool = False,  # noqa: ARG002
    ) -> list[Completion]:
        sampling = Sampling(new_tokens, 0.0 if greedy else 1.0, stop_ids=(), seed=self._seed)
        return self.engine.generate(prompts, n, sampling)

    def statistics(self) -> dict[str, float]:
        return self.engine.statistics()

    def standby(self) -> None:
        self.engine.standby()


class Generate:
    """Transformers' `generate`, one row for each completion."""

    def __init__(self, model: Any, seed: int) -> None:
        self._model, self._seed = model.eval(), seed
        _never_stop(model)

    @torch.no_grad()
    def complete(
        self, prompts: Prompts, n: int, new_tokens: int, *, greedy: bool = False, logprobs: bool = False
    ) -> list[Completion]:
        torch.manual_seed(self._seed)
        rows = [list(prompt) for prompt in prompts for _ in range(n)]
        ids = torch.tensor(rows, device=self._model.device)
        sampling: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "top_p": 1.0}
        out = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            use_cache=True,
            return_dict_in_generate=True,
            output_logits=logprobs,
            **sampling,
        )
        tokens = out.sequences[:, ids.shape[1] :]
        found: list[list[float]] = [[] for _ in rows]
        if logprobs:
            steps = [logits.float().log_softmax(-1).gather(1, tokens[:, [i]]) for i, logits in enumerate(out.logits)]
            found = torch.cat(steps, dim=1).tolist()
        return [Completion(i // n, row, found[i], False) for i, row in enumerate(tokens.tolist())]

    def statistics(self) -> dict[str, float]:
        return {}

    def standby(self) -> None:
        _empty(self._model.device)


class GenerateBatch:
    """Transformers' continuous batching. Its cache is as large as needed; by itself it would take all of the memory.

    Its manager, with what it records, is kept from one call to the next.
    """

    def __init__(self, model: Any, size: Size, seed: int) -> None:
        self._model, self._size, self._seed = model.eval(), size, seed
        self._greedy = False
        _never_stop(model)

    @torch.no_grad()
    def complete(
        self,
        prompts: Prompts,
        n: int,
        new_tokens: int,
        *,
        greedy: bool = False,
        logprobs: bool = False,  # noqa: ARG002
    ) -> list[Completion]:
        if greedy != self._greedy:  # a manager samples as it did at first
            self._model.destroy_cached_continuous_batching_manager()
            self._greedy = greedy
        config = copy.deepcopy(self._model.generation_config)
        config.update(max_new_tokens=new_tokens, do_sample=not greedy, num_return_sequences=1)
        rows = [list(prompt) for prompt in prompts for _ in range(n)]
        outputs = list(
            self._model.generate_batch(
                rows,
                generation_config=config,
                continuous_batching_config=self._config(),
                max_new_tokens=new_tokens,
                persistent_manager=True,
            ).values()
        )
        wrong = [output for output in outputs if len(output.generated_tokens) != new_tokens]
        if len(outputs) != len(rows) or wrong:
            reason = wrong[0].error if wrong else None
            raise RuntimeError(
                f"generate_batch gave {len(outputs)} completions of {len(rows)}, {len(wrong)} of them not of "
                f"{new_tokens} tokens: {reason or 'see its log'}"
            )
        return [Completion(i // n, list(output.generated_tokens), [], False) for i, output in enumerate(outputs)]

    def _config(self) -> Any:
        from transformers import ContinuousBatchingConfig

        size, config = self._size, ContinuousBatchingConfig(seed=self._seed)
        config.num_blocks = size.slots * (-(-size.length // config.block_size) + 1)
        config.max_batch_tokens = min(8192, max(256, size.slots * size.prompt))
        return config

    def statistics(self) -> dict[str, float]:
        return {}

    def standby(self) -> None:
        self._model.destroy_cached_continuous_batching_manager()
        _empty(self._model.device)


def _never_stop(model: Any) -> None:
    """Have no token end a completion, and none of the model's defaults narrow the choice."""
    config = model.generation_config
    config.eos_token_id, config.pad_token_id = None, 0


def _empty(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
