"""vLLM on the trainer's own modules: its scheduler, pages and attention, and not one weight of its own.

    engine = VLLMEngine(model)
    completions = engine.generate(prompts, n=8, sampling=Sampling(temperature=0.7))
    ...                                     # optimiser steps: nothing to send
    completions = engine.generate(...)      # with the weights as they are now

`vllm_layers.py` has the two registrations by which vLLM's linears are the trainer's. What is left to do after a step is
to forget the keys and values of prompts that vLLM still has (`reset_prefix_cache`), at each `generate`.

Log-probabilities are those of `Completion`: vLLM's logits are scaled by 1 / temperature before it sees them, so that
its raw log-probabilities are the log-softmax over the whole vocabulary, whether top-k or top-p cut it afterwards.

vLLM runs in the trainer's process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`): modules cannot be shared with another one. The
engine starts with the first `generate`, when adapters are there. Shown on CPUs; on a GPU, decoding is captured in CUDA
graphs, and nothing is compiled.
"""

import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.decoders.hooks import CAPTURING, is_hooked
from octavo.numerics.checks import check_choice, check_positive_int
from octavo.rl.checks import check_finite, check_prompts, check_sampling, check_stops
from octavo.rl.completions import Completion, Sampling
from octavo.rl.policy import PRODUCTS, Policy
from octavo.rl.stops import StopTexts

_IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
_PAGE = 128  # tokens of a page of vLLM's on a CPU, of which the last of a completion is partly filled
# Unless somebody has set them. Threads of this process are the trainer's, and stay where they are.
_ENVIRONMENT = {_IN_PROCESS: "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


def is_installed() -> bool:
    found = importlib.util.find_spec("vllm")
    return found is not None and found.origin is not None  # a mere folder of that name has none


class VLLMEngine:
    """Completes prompts by vLLM with the weights of a model that somebody else owns (`completions.Engine`).

    `model`: of a family that Octavo knows, with or without PEFT's LoRA, in FP8 or not. `slots`: completions that are
    written at once. `max_length`: tokens of a prompt and its completion together, at most; None: the model's positions.
    `products`: "weights" multiplies activations as they are with FP8 weights; "fp8" keeps the model's own.
    `exact_logprobs`: refuse top-k and top-p, with which the log-probabilities are not those that were sampled from.
    `memory_share`: of the device's memory, for vLLM, which is to say for its cache; `cache_bytes` says instead how
    large that is. `can_stand_by`: have `standby` free the cache, which takes a GPU, and an allocator without
    `expandable_segments:True`. `options`: further arguments of `vllm.LLM`.
    """

    name = "vllm"

    def __init__(
        self,
        model: Any,
        *,
        slots: int = 64,
        max_length: int | None = None,
        products: str = "weights",
        exact_logprobs: bool = False,
        memory_share: float = 0.6,
        cache_bytes: int | None = None,
        can_stand_by: bool = False,
        **options: Any,
    ) -> None:
        check_choice("products", products, PRODUCTS)
        for name, value in (("slots", slots), ("max_length", max_length), ("cache_bytes", cache_bytes)):
            if value is not None:
                check_positive_int(name, value)
        if not 0 < memory_share <= 1:
            raise ValueError(f"memory_share={memory_share!r}: a share of the memory, above 0 to 1")
        _check_process()
        self.policy = Policy(model)
        _check_embedding(self.policy.model.get_input_embeddings())
        positions = self.policy.positions
        if max_length is not None and positions is not None and max_length > positions:
            raise ValueError(f"max_length={max_length}: the model has {positions} positions")
        longest = max_length if max_length is not None else positions
        if longest is None:
            raise ValueError("max_length=None: the model names no number of positions; say how long completions get")
        self.max_length: int = longest
        self.slots, self.products, self.exact_logprobs, self.options = slots, products, exact_logprobs, options
        self.memory_share, self.cache_bytes = memory_share, cache_bytes
        self.can_stand_by = can_stand_by
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-vllm-")  # of the configuration, which vLLM reads
        self._llm: Any = None
        self._logits: Any = None  # vLLM's module that scales logits
        self._has_graphs = False
        self._recorded: list[Any] = []  # what CUDA graphs depend on, as it was when vLLM started
        self._is_awake = True
        self._statistics: dict[str, float] = {}

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Completion]:
        """Complete each prompt n times with the weights as they are now, in the order of the prompts."""
        check_positive_int("n", n)
        given = [list(prompt) for prompt in prompts]
        check_sampling(sampling, self.exact_logprobs)
        self._follow()
        _check_embedding(self.policy.model.get_input_embeddings())
        _check_layers(self.policy.model)
        check_prompts(given, self.policy, self.max_length)
        stop_ids = self.policy.stop_ids() if sampling.stop_ids is None else sampling.stop_ids
        check_stops(stop_ids, self.policy)
        started = time.perf_counter()
        drawn = 1 if sampling.is_greedy else n  # vLLM completes a prompt greedily once alone
        seed = int(torch.randint(2**63 - 1, ())) if sampling.seed is None else sampling.seed
        self.wake()
        with self.policy.rollout(self.products), self._own_random_numbers():
            llm = self._start()
            self._check_graphs()
            self._share()
            llm.reset_prefix_cache()  # keys and values of weights that have changed since
            if sampling.stop_texts is not None:  # vLLM has no tokenizer of its own here
                llm.llm_engine.output_processor.tokenizer = sampling.stop_texts.tokenizer
            self._logits.scale = 1.0 if sampling.is_greedy else 1.0 / sampling.temperature
            torch.manual_seed(seed)
            inputs = [{"prompt_token_ids": prompt} for prompt in given]
            try:
                outputs = llm.generate(inputs, _parameters(drawn, sampling, stop_ids), use_tqdm=False)
            except BaseException:  # also a Ctrl-C, after which a notebook goes on
                _abort(llm)
                raise
        done = [
            _completion(index, part, sampling.stop_texts)
            for index, output in enumerate(outputs)
            for part in output.outputs
            for _ in range(n // drawn)
        ]
        check_finite(done)
        self._note(done, time.perf_counter() - started)
        return done

    def standby(self) -> None:
        """Free the cache, and copies of weights that no CUDA graph reads. On a CPU vLLM keeps its cache."""
        if not self._has_graphs:
            self.policy.release()
        if self._llm is not None and self._is_awake and self.can_stand_by and self.policy.device.type == "cuda":
            self._llm.sleep(level=0)
            self._llm.release_kv_cache_memory()
            self._is_awake = False

    def wake(self) -> None:
        """Take the memory of the cache again; `generate` does so itself."""
        if not self._is_awake:
            self._llm.wake_up(["kv_cache", "scheduling"])
            self._is_awake = True

    def statistics(self) -> dict[str, float]:
        """Figures of the last `generate`.

        `prefills`: requests to vLLM, one for each completion, which take whole pages of their prompt from one another;
        `tokens`: generated; `seconds`; `tokens_per_second`; `stopped`: the share that a stop token or text ended.
        """
        return dict(self._statistics)

    def own_weight_bytes(self) -> int:
        """Count the bytes of Parameters that vLLM has and the trainer has not, by where they are in memory."""
        theirs = {parameter.untyped_storage().data_ptr() for parameter in self.policy.model.parameters()}
        own = {parameter.untyped_storage().data_ptr(): parameter for parameter in self.vllm_model().parameters()}
        return sum(own[place].untyped_storage().nbytes() for place in own.keys() - theirs)

    def vllm_model(self) -> nn.Module:
        """Return vLLM's model, started if it is not yet."""
        with self.policy.rollout(self.products), self._own_random_numbers():
            model: nn.Module = self._start().llm_engine.model_executor.driver_worker.get_model()
        return model

    def _start(self) -> Any:
        """vLLM's engine, started if it is not yet."""
        if self._llm is None:
            folder = Path(self._folder.name)
            _write_config(self.policy.model, folder)
            with _as_it_was():
                from vllm import LLM

                from octavo.rl import vllm_layers

                with vllm_layers.sharing(self.policy):
                    self._llm = LLM(model=str(folder), **self._arguments(vllm_layers.METHOD) | self.options)
                model = self._llm.llm_engine.model_executor.driver_worker.get_model()
                self._logits = vllm_layers.logits_processor(model)
            self._has_graphs = self.policy.device.type == "cuda"
            self._recorded = self.policy.state()
        return self._llm

    def _arguments(self, method: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "quantization": method,
            "load_format": method,
            "skip_tokenizer_init": True,
            "dtype": str(self.policy.dtype).removeprefix("torch."),
            "max_model_len": self.max_length,
            "max_num_seqs": self.slots,
            "gpu_memory_utilization": self.memory_share,
            "kv_cache_memory_bytes": self._cache_bytes(),
            "logprobs_mode": "raw_logprobs",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        }
        if self.policy.device.type == "cuda":
            # Dynamo would trace into the trainer's modules. Graphs of decoding are what a GPU needs.
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            return arguments | {"compilation_config": graphs, "enable_sleep_mode": self.can_stand_by}
        return arguments | {"enforce_eager": True}

    def _cache_bytes(self) -> int | None:
        """Bytes of vLLM's cache, where we say how many. On a CPU it would fill its share of the memory, used or not."""
        if self.cache_bytes is not None or self.policy.device.type == "cuda":
            return self.cache_bytes
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        tokens = self.slots * (self.max_length + _PAGE)
        return min(tokens * self.policy.cache_format("auto").bytes_per_token, int(self.memory_share * memory))

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Leave the trainer's random numbers alone: vLLM sets a seed when it starts, and draws from the same."""
        devices = [self.policy.device] if self.policy.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            yield

    def _follow(self) -> None:
        """Start where the model has been moved or cast to by now."""
        place = self.policy.place()
        if place != (self.policy.device, self.policy.dtype):
            if self._llm is not None:
                raise ValueError(
                    f"the model is on {place[0]} in {place[1]}; vLLM has started with {self.policy.device} and "
                    f"{self.policy.dtype}: make a new VLLMEngine"
                )
            self.policy.device, self.policy.dtype = place
        tokens = self.policy.tokens()
        if tokens != self.policy.vocabulary:
            if self._llm is not None:
                raise ValueError(
                    f"the model knows {tokens} tokens; vLLM has started with {self.policy.vocabulary}: make a new "
                    "VLLMEngine"
                )
            self.policy.vocabulary = tokens

    def _share(self) -> None:
        """Give vLLM's norms the Parameters that the trainer has now: PEFT or an assignment may bring others."""
        from octavo.rl import vllm_layers

        vllm_layers.share_norms(self._llm.llm_engine.model_executor.driver_worker.get_model(), self.policy.model)

    def _check_graphs(self) -> None:
        """Raise if the modules are not those that vLLM has recorded."""
        if self._has_graphs and self.policy.state() != self._recorded:
            raise ValueError(
                "modules or adapters of the model are others than when vLLM started, and its CUDA graphs read those: "
                "make a new VLLMEngine"
            )

    def _note(self, done: Sequence[Completion], seconds: float) -> None:
        tokens = sum(len(completion.tokens) for completion in done)
        self._statistics = {
            "prefills": float(len(done)),
            "tokens": float(tokens),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "stopped": sum(completion.stopped for completion in done) / max(len(done), 1),
        }


def _parameters(n: int, sampling: Sampling, stop_ids: Sequence[int]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        n=n,
        temperature=0.0 if sampling.is_greedy else 1.0,  # logits are scaled already
        top_k=0 if sampling.top_k is None else sampling.top_k,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        min_p=sampling.min_p or 0.0,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(stop_ids),
        ignore_eos=True,  # of the configuration: `stop_ids` has them, or says otherwise
        logprobs=0,  # of the token that was drawn
        stop=None if sampling.stop_texts is None else list(sampling.stop_texts.texts),
        include_stop_str_in_output=True,  # otherwise the last tokens are held back
        skip_special_tokens=False,
        detokenize=sampling.stop_texts is not None,
    )


def _abort(llm: Any) -> None:
    """Have vLLM forget the requests of a call that broke off: it would complete them together with the next ones."""
    engine = llm.llm_engine
    engine.abort_request(list(engine.output_processor.request_states), internal=True)


def _completion(prompt: int, part: Any, texts: StopTexts | None) -> Completion:
    tokens = list(part.token_ids)
    logprobs = [places[token].logprob for token, places in zip(tokens, part.logprobs, strict=True)]
    end = None if texts is None else texts.end(tokens, texts.reach)  # vLLM stops at the token that completes a text
    return Completion(prompt, tokens[:end], logprobs[:end], part.finish_reason == "stop" or end is not None)


def _check_process() -> None:
    if not is_installed():
        raise ModuleNotFoundError("engine='vllm': vLLM is not installed; install it, or take engine='native'")
    if os.environ.get(_IN_PROCESS, "0") != "0":
        raise ValueError(
            f"{_IN_PROCESS}={os.environ[_IN_PROCESS]}: another process cannot share the trainer's modules; set it to 0"
        )


def _check_layers(model: Any) -> None:
    """Raise where a layer does more than vLLM's own, which calls the trainer's linears and nothing else of a layer."""
    from transformers.activations import ACT2FN

    activation = type(ACT2FN[getattr(model.config, "hidden_act", None) or model.config.hidden_activation])
    for name, module in model.model.layers.named_modules(prefix="model.layers"):
        is_linear = isinstance(module, nn.Linear) or hasattr(module, "base_layer")
        hooked = not is_linear and ".lora_" not in name and is_hooked(module, beside=(CAPTURING,))
        if hooked or type(getattr(module, "act_fn", None)) not in (activation, type(None)):
            what = "hooks, or a forward of its own" if hooked else "another activation than its configuration says"
            raise ValueError(f"{name} has {what}: vLLM would compute without; take engine='native'")


def _check_embedding(embedding: Any) -> None:
    """Raise unless tokens are rows of its weight: of a plain one, and of one that PEFT trains a copy of."""
    if not isinstance(getattr(embedding, "original_module", embedding), nn.Embedding):
        kind = type(embedding)
        raise ValueError(
            f"the embedding is a {kind.__module__}.{kind.__name__}: vLLM shares plain ones; have adapters on linears "
            "alone, or take engine='native'"
        )


def _write_config(model: Any, folder: Path) -> None:
    """Write the configuration of a model for vLLM, to which nothing in it is quantised."""
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    plain = type(model.config).from_dict(config)
    plain.architectures = [type(model).__name__]
    plain.save_pretrained(folder)


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Give the process back what vLLM changes of it while it starts; `_ENVIRONMENT` stays, for it is read later."""
    set_num_threads, dtype = torch.set_num_threads, torch.get_default_dtype()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_default_dtype(dtype)
