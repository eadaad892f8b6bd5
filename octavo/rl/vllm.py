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
engine starts with the first `generate`, when adapters are there. Shown on CPUs; on a GPU, layers are captured in CUDA
graphs of decoding alone, not compiled.
"""

import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.held import HeldWeights, holding
from octavo.nn.linear import weights_only
from octavo.numerics.checks import check_choice, check_positive_int
from octavo.rl.completions import Completion, Sampling

PRODUCTS = ("weights_only", "fp8")
_IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
# Unless somebody has set them. Threads of this process are the trainer's, and stay where they are.
_ENVIRONMENT = {_IN_PROCESS: "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


def is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


class VLLMEngine:
    """Completes prompts by vLLM with the weights of a model that somebody else owns (`completions.Engine`)."""

    name = "vllm"

    def __init__(
        self,
        model: nn.Module,
        *,
        max_length: int | None = None,
        slots: int = 64,
        products: str = "weights_only",
        gpu_memory_utilization: float = 0.6,
        cache_bytes: int | None = None,
        can_stand_by: bool = False,
        **options: Any,
    ) -> None:
        """Prepare an engine for this model of transformers, or of PEFT around one. It starts when it is first used.

        `max_length`: of prompt and completion together; None is what the model has positions for. `slots`: completions
        that run at a time. `products`: "weights_only" multiplies FP8 weights, dequantised, with activations as they
        are; "fp8" as the model itself does. `gpu_memory_utilization`: share of the memory that vLLM may take, which is
        its cache; `cache_bytes` says instead how large that is. `can_stand_by`: `standby` gives the cache's memory
        back; on a GPU, and not with `expandable_segments:True`. `options`: further arguments of `vllm.LLM`.
        """
        check_choice("products", products, PRODUCTS)
        check_positive_int("slots", slots)
        if max_length is not None:
            check_positive_int("max_length", max_length)
        if cache_bytes is not None:
            check_positive_int("cache_bytes", cache_bytes)
        if not is_installed():
            raise ModuleNotFoundError("engine='vllm': vLLM is not installed; pip install vllm, or take engine='native'")
        if os.environ.get(_IN_PROCESS, "0") != "0":
            raise ValueError(
                f"{_IN_PROCESS}={os.environ[_IN_PROCESS]}: another process cannot share the trainer's modules; set it "
                "to 0, or leave it out"
            )
        self.model = model
        self.trainer: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        _check_shareable(self.trainer)
        self.max_length, self.slots, self.products = max_length, slots, products
        self.gpu_memory_utilization, self.cache_bytes = gpu_memory_utilization, cache_bytes
        self.can_stand_by = can_stand_by and self.device.type == "cuda"
        self.options = options
        self._llm: Any = None
        self._is_awake = True
        self._held = HeldWeights()
        self._statistics = {"prefills": 0.0, "tokens": 0.0, "seconds": 0.0}
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-vllm-")

    @property
    def device(self) -> torch.device:
        device: torch.device = self.trainer.get_input_embeddings().weight.device
        return device

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Completion]:
        """Complete each prompt n times: completions of the first prompt, of the second, and so on."""
        check_positive_int("n", n)
        self._check_prompts(prompts, sampling)
        self.wake()
        start = time.perf_counter()
        seed = int(torch.randint(2**62, ())) if sampling.seed is None else sampling.seed
        with self._computing():
            llm = self._start()
            llm.reset_prefix_cache()  # keys and values of weights that have changed since
            self._logits.scale = self._scale / (1.0 if sampling.is_greedy else sampling.temperature)
            with torch.inference_mode():  # in which vLLM computes, and so made them
                self._held.refresh()
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                torch.manual_seed(seed)
                outputs = llm.generate(
                    [{"prompt_token_ids": list(prompt)} for prompt in prompts], self._parameters(n, sampling),
                    use_tqdm=False,
                )  # fmt: skip
        completions = [_completion(i, part) for i, output in enumerate(outputs) for part in output.outputs]
        tokens = sum(len(completion.tokens) for completion in completions)
        # Each completion is a request of its own to vLLM, which takes whole pages of a prompt from the one before.
        prefills, seconds = float(len(completions)), time.perf_counter() - start
        self._statistics = {"prefills": prefills, "tokens": float(tokens), "seconds": seconds}
        return completions

    def standby(self) -> None:
        """Give the memory of the cache back. On a CPU, or without `can_stand_by`, vLLM keeps it."""
        self._held.release()
        if self._llm is not None and self._is_awake and self.can_stand_by:
            self._llm.sleep(level=0)
            self._llm.release_kv_cache_memory()
            self._is_awake = False

    def wake(self) -> None:
        """Take the memory of the cache again; `generate` does so itself."""
        if not self._is_awake:
            self._llm.wake_up(["kv_cache"])
            self._llm.wake_up(["scheduling"])
            self._is_awake = True

    def statistics(self) -> dict[str, float]:
        """Figures of the last `generate`: prefills, tokens, seconds."""
        return dict(self._statistics)

    def own_weight_bytes(self) -> int:
        """Count the bytes of weights that vLLM holds and the trainer does not, by their storage."""
        theirs = {tensor.untyped_storage().data_ptr() for tensor in _weights_of(self.trainer)}
        own = {tensor.untyped_storage().data_ptr(): tensor for tensor in _weights_of(self._vllm_model())}
        mine = sum(tensor.untyped_storage().nbytes() for place, tensor in own.items() if place not in theirs)
        return mine + self._held.nbytes

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Have the trainer's modules compute as in evaluation, without gradients, by the products asked for."""
        trained = [module for module in self.trainer.modules() if module.training]
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(holding(self._held))
            if self.products == "weights_only":
                stack.enter_context(weights_only())
            for module in trained:
                module.training = False
            try:
                yield
            finally:
                for module in trained:
                    module.training = True

    def _start(self) -> Any:
        """vLLM's engine, started if it is not yet."""
        if self._llm is None:
            folder = Path(self._folder.name)
            self._write_config(folder)
            with _as_it_was(), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                from vllm import LLM

                from octavo.rl import vllm_layers

                with vllm_layers.sharing(self.trainer):
                    self._llm = LLM(model=str(folder), **self._arguments(vllm_layers.METHOD) | self.options)
                self._logits = vllm_layers.SharedLoader.scale_of(self._vllm_model())
                self._scale = self._logits.scale
        return self._llm

    def _arguments(self, method: str) -> dict[str, Any]:
        dtype = self.trainer.get_input_embeddings().weight.dtype
        arguments: dict[str, Any] = {
            "quantization": method,
            "load_format": method,
            "skip_tokenizer_init": True,
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": self._positions(),
            "max_num_seqs": self.slots,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "logprobs_mode": "raw_logprobs",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        }
        if self.cache_bytes is not None:
            arguments["kv_cache_memory_bytes"] = self.cache_bytes
        if self.device.type == "cuda":
            # Dynamo would trace into the trainer's modules; graphs of decoding alone are what it is for here.
            arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            arguments["enable_sleep_mode"] = self.can_stand_by
        else:
            arguments["enforce_eager"] = True
        return arguments

    def _write_config(self, folder: Path) -> None:
        """Write the model's configuration, which is all that vLLM reads; nothing in it is quantised."""
        config = self.trainer.config.to_dict()
        config.pop("quantization_config", None)
        config["architectures"] = [type(self.trainer).__name__]
        type(self.trainer.config).from_dict(config).save_pretrained(folder)

    def _vllm_model(self) -> nn.Module:
        worker = self._start().llm_engine.model_executor.driver_worker
        model: nn.Module = worker.get_model()
        return model

    def _positions(self) -> int:
        limit = getattr(self.trainer.config, "max_position_embeddings", None)
        known = [length for length in (self.max_length, limit) if length is not None]
        if not known:
            raise ValueError("max_length=None: the model names no number of positions; say how long completions get")
        return min(known)

    def _check_prompts(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        if not len(prompts):
            raise ValueError("prompts is empty: there is nothing to complete")
        vocabulary = self.trainer.get_output_embeddings().weight.shape[0]
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompts[{i}] is empty: it needs at least one token")
            if not (0 <= min(prompt) and max(prompt) < vocabulary):
                wrong = min(prompt) if min(prompt) < 0 else max(prompt)
                raise ValueError(f"prompts[{i}] has the token {wrong}; the model knows 0 to {vocabulary - 1}")
            if len(prompt) + sampling.max_new_tokens > self._positions():
                raise ValueError(
                    f"prompts[{i}] has {len(prompt)} tokens, and max_new_tokens={sampling.max_new_tokens}: together "
                    f"more than the {self._positions()} positions of the engine"
                )

    def _parameters(self, n: int, sampling: Sampling) -> Any:
        from vllm import SamplingParams

        stops = self._stop_ids() if sampling.stop_ids is None else sampling.stop_ids
        return SamplingParams(
            n=n,
            temperature=0.0 if sampling.is_greedy else 1.0,  # logits are scaled already
            top_k=0 if sampling.top_k is None else sampling.top_k,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(stops),
            ignore_eos=True,  # of the configuration: `stop_ids` has them, or says otherwise
            logprobs=0,  # of the token that was drawn
            detokenize=False,
        )

    def _stop_ids(self) -> tuple[int, ...]:
        """The ends of sequence that the model names."""
        for config in (getattr(self.trainer, "generation_config", None), self.trainer.config):
            found = getattr(config, "eos_token_id", None)
            if found is not None:
                return (found,) if isinstance(found, int) else tuple(found)
        return ()


def _completion(prompt: int, part: Any) -> Completion:
    tokens = list(part.token_ids)
    logprobs = [places[token].logprob for token, places in zip(tokens, part.logprobs, strict=True)]
    return Completion(prompt, tokens, logprobs, stopped=part.finish_reason == "stop")


def _check_shareable(trainer: Any) -> None:
    granularities = {m.granularity for m in trainer.modules() if isinstance(m, FP8FrozenLinear) and m.fp8_products}
    if "tensor" in granularities:
        raise ValueError(
            "granularity='tensor': one scale for a whole batch, so that a token's probability would depend on its "
            "batch-mates; load the model with load_in_fp8='channel' or 'block'"
        )
    embedding = trainer.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        raise ValueError(
            f"the embedding is a {type(embedding).__name__}: vLLM shares plain ones; train adapters on linears alone, "
            "or take engine='native'"
        )


def _weights_of(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        yield from module.parameters(recurse=False)


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
