"""The model of a trainer, as a rollout uses it: checked once, and unchanged by it.

A rollout runs the model's own forward. While it lasts, the model evaluates (no dropout, no checkpointing), adapters
are in the dtype of the activations, trained weights are held in FP8 (`nn/held.py`), and products take activations as
they are, unless the model's own FP8 products are asked for. Afterwards, and after an error, all is as it was.

Adapters are never merged: rounding to FP8 again would eat updates below an FP8 step. PEFT keeps them in FP32 beside a
BF16 model; a BF16 copy is made for each rollout, in the same memory each time.

Two threads that roll out on one model take turns (`lock`), whatever engines they use: each changes its modules, and
its configuration, which another model may share.
"""

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.decoders import match
from octavo.decoders.attention import plainly_causal
from octavo.decoders.decoding import Attends, decoding
from octavo.decoders.fuse import fused_for_decoding
from octavo.decoders.graph_state import state_of
from octavo.decoders.hooks import brings_weights, is_hooked
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.held import HeldWeights, holding
from octavo.nn.linear import LinearInFP8, weights_only
from octavo.nn.sharded import is_sharded
from octavo.nn.walk import modules_of
from octavo.rl.cache import CacheFormat

PRODUCTS = ("weights", "fp8")
_FIXED_ROPE = ("default", "linear", "llama3", "yarn", "proportional")  # others depend on the longest sequence so far
_ADAPTERS = ("lora_A", "lora_B")
_LOCKS: dict[int, Any] = {}  # by the configuration, which models may share: a rollout changes it, too


class Policy:
    """A causal language model of a known family, with or without PEFT's adapters around it."""

    def __init__(self, model: Any) -> None:
        self.model: Any = _without_peft(model)
        self.config = self.model.config
        self.lock = lock_of(self.config)  # of all engines on this model
        self.attentions = self.layers()
        _check_rotation(self.config)
        self.device, self.dtype = self.place()
        self.vocabulary = self.tokens()
        self.hidden_size = int(self.config.hidden_size)
        self.positions: int | None = getattr(self.config, "max_position_embeddings", None)
        self.held = HeldWeights()
        self._copied: Sequence[nn.Parameter] = ()
        self._copies: list[Tensor] = []
        self._head: Tensor | None = None

    def place(self) -> tuple[torch.device, torch.dtype]:
        """Return where the model is now, and in which dtype it computes. Its linears are checked, too."""
        modules = modules_of(self.model)
        _check_whole(self.model, modules)
        _check_scales(self.model, modules)
        return _device_of(modules), self.model.get_input_embeddings().weight.dtype

    def layers(self) -> list[Any]:
        """Return the attentions as they are now, one for each layer."""
        return _attentions(self.model)

    def tokens(self) -> int:
        """Return how many tokens the model knows now: as many as its embedding and its head have."""
        return min(self.model.get_input_embeddings().weight.shape[0], _base(self.model.lm_head).out_features)

    def cache_format(self, kv_dtype: str) -> CacheFormat:
        """Return what a cache holds of one token."""
        first = self.attentions[0]
        dtype = {"auto": self.dtype, "bf16": torch.bfloat16, "fp8": torch.uint8}[kv_dtype]
        heads = _base(first.k_proj).out_features // first.head_dim
        return CacheFormat(len(self.attentions), heads, first.head_dim, dtype)

    def stop_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a sequence, as the model says; () if it does not."""
        return ends_of(self.model)

    def hidden(self, attends: Attends, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the last hidden states `[B, S, H]` of tokens at these positions, which attend by a cache."""
        mask = plainly_causal(ids)
        holders = (self.model, self.model.model, *self.attentions)
        configs = {id(holder.config): holder.config for holder in holders}
        with decoding(list(configs.values()), attends):
            outputs = self.model.model(
                input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, return_dict=True
            )
        states: Tensor = outputs.last_hidden_state
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute FP32 logits `[T, V]` of hidden states `[T, H]`: products of BF16 are summed, and kept, in FP32."""
        head = self.model.lm_head
        if self._head is not None:
            logits = hidden.float() @ self._head.t()
        elif not _is_plain(head):
            logits = head(hidden).float()
        elif head.weight.dtype == torch.float32:
            logits = hidden.float() @ head.weight.t()
        else:
            logits = torch.mm(hidden.to(head.weight.dtype), head.weight.t(), out_dtype=torch.float32)
        bound = getattr(self.config, "final_logit_softcapping", None)
        return logits if bound is None else bound * torch.tanh(logits / bound)

    def state(self) -> list[Any]:
        """Return what a recorded step depends on (`decoders/graph_state.py`); to be asked inside `rollout`."""
        return state_of(self.model)

    @contextmanager
    def rollout(self, products: str) -> Iterator[None]:
        """Have the model generate. `products`: "weights" or "fp8"."""
        with ExitStack() as stack:
            stack.enter_context(self.lock)
            stack.enter_context(torch.inference_mode(False))  # tensors made in it could not be written to outside
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
            stack.enter_context(_evaluating(self.model))
            stack.enter_context(fused_for_decoding(self.model))
            stack.enter_context(_UNCOMPILED)
            stack.enter_context(self._with_copies())
            stack.enter_context(holding(self.held))
            self.held.refresh()
            if products == "weights":
                stack.enter_context(weights_only())
            head = self.model.lm_head
            if self.device.type != "cuda" and _is_plain(head) and head.weight.dtype != torch.float32:
                self._head = head.weight.detach().float()  # a CPU has no product that sums BF16 into FP32
            stack.callback(setattr, self, "_head", None)
            yield

    def release(self) -> None:
        """Free the copies of weights that rollouts share."""
        self.held.release()
        self._copied, self._copies = (), []

    @contextmanager
    def _with_copies(self) -> Iterator[None]:
        """Give modules copies of their adapters in the dtype of the activations, where those are in another."""
        modules = modules_of(self.model)
        found = [
            (matrix._parameters, kind, parameter)
            for part in _ADAPTERS  # first all A, then all B: those of one product lie side by side
            for module in modules
            for matrices in [module._modules.get(part)]
            if matrices is not None
            for matrix in modules_of(matrices)
            for kind in ("weight", "bias")
            for parameter in [matrix._parameters.get(kind)]
            if parameter is not None and parameter.dtype != self.dtype
        ]
        copies = self._copies_of([parameter for *_, parameter in found])
        try:
            for (own, kind, _), copy in zip(found, copies, strict=True):
                own[kind] = copy
            yield
        finally:
            for own, kind, parameter in found:
                own[kind] = parameter

    def _copies_of(self, parameters: Sequence[nn.Parameter]) -> Sequence[Any]:
        """Return the parameters' values as they are now, in the memory of the last time, if they are the same ones."""
        if [id(p) for p in parameters] != [id(p) for p in self._copied]:
            flat = torch.empty(sum(p.numel() for p in parameters), dtype=self.dtype, device=self.device)
            parts = flat.split([p.numel() for p in parameters])
            self._copied, self._copies = parameters, [x.view(p.shape) for x, p in zip(parts, parameters, strict=True)]
        if self._copies:
            torch._foreach_copy_(self._copies, [p.detach() for p in parameters])
        return self._copies


def _check_whole(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Refuse shards of FSDP2, and weights that ZeRO-3 has freed."""
    for parameter in _parameters_of(modules):
        if is_sharded(parameter) or (hasattr(parameter, "ds_id") and parameter.numel() == 0):
            name = next(name for name, each in model.named_parameters() if each is parameter)
            raise ValueError(
                f"{name} is a shard, and an engine needs whole weights: train under DDP, where each rank has the FP8 "
                "base, or load the model with fast_inference=False, so that transformers generates"
            )


def ends_of(model: Any) -> tuple[int, ...]:
    """Return the tokens that end a sequence, as a model says; () if it does not."""
    for holder in (getattr(model, "generation_config", None), model.config):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()


def _without_peft(model: Any) -> Any:
    """The causal language model inside PEFT's wrapper, with the adapters in its layers."""
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(f"adapter {name!r} learns a prompt ({type(config).__name__}): the engine takes LoRA")
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not match.is_of_family(inner, "ForCausalLM"):
        raise ValueError(
            f"{type(inner).__name__} is no causal language model that the native engine knows "
            f"({', '.join(match.FAMILIES)}): its attention cannot be reached; use the model's own generate, or vLLM"
        )
    return inner


def _attentions(model: Any) -> list[Any]:
    found = [module for module in modules_of(model) if match.is_of_family(module, "Attention")]
    indices = [getattr(module, "layer_idx", None) for module in found]
    if indices != list(range(model.config.num_hidden_layers)):
        raise ValueError(
            f"{type(model).__name__} has {model.config.num_hidden_layers} layers and attentions of layers {indices}: "
            "the native engine needs one of its family's own in each layer"
        )
    return found


def _check_rotation(config: Any) -> None:
    """Raise for a rotation by position that changes as sequences grow: cached keys would have the old one."""
    given = getattr(config, "rope_parameters", None) or {}
    each = [value for value in given.values() if isinstance(value, dict)] or [given]
    for one in each:
        kind = one.get("rope_type", "default")
        if kind not in _FIXED_ROPE:
            raise ValueError(
                f"rope_type={kind!r} rotates by the length of the longest sequence, and keys in a cache would keep the "
                f"old rotation; the native engine takes {', '.join(_FIXED_ROPE)}"
            )


def _parameters_of(modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    return (each for module in modules for each in module._parameters.values() if each is not None)


def _check_scales(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if not isinstance(module, LinearInFP8):
            continue
        granularities = {getattr(module, "granularity", None), module.recipe.x.granularity, module.recipe.w.granularity}
        if "tensor" in granularities:
            frozen = isinstance(module, FP8FrozenLinear)
            name = next(name for name, each in model.named_modules() if each is module)
            # `full_finetuning=True, load_in_fp8=True` is the recipe `delayed`.
            fix = "" if frozen else "; with full_finetuning=True, load_in_fp8=True means 'tensor'"
            raise ValueError(
                f"{name} is in FP8 with granularity='tensor': one scale for a whole batch lets a token's probability "
                f"depend on its neighbours; for reinforcement learning use 'channel' or 'block' "
                f"(load_in_fp8='channel'{fix})"
            )


def _device_of(modules: Sequence[nn.Module]) -> torch.device:
    devices = {parameter.device for parameter in _parameters_of(modules)}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise ValueError(
            f"the weights are on {', '.join(sorted(map(str, devices)))}: the native engine takes a model on one device "
            "(device_map={'': 0})"
        )
    return devices.pop()


def _base(module: Any) -> Any:
    """A linear without what PEFT has put around it."""
    while hasattr(module, "base_layer") or hasattr(module, "original_module"):
        module = module.base_layer if hasattr(module, "base_layer") else module.original_module
    return module


def _is_plain(head: Any) -> bool:
    return type(head) is nn.Linear and head.bias is None and not is_hooked(head) and not brings_weights(head)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Have all modules evaluate; afterwards each is as it was, whatever its neighbours are."""
    # What `torch.compile` puts around a module has no mode of its own, but that of the module.
    training = [module for module in modules_of(model) if module.__dict__.get("training")]
    try:
        for module in training:
            module.__dict__["training"] = False  # as by assignment, which first asks whether it is a Parameter
        yield
    finally:
        for module in training:
            module.__dict__["training"] = True


def lock_of(config: Any) -> Any:
    """The lock of a configuration, as long as it exists."""
    lock = _LOCKS.setdefault(id(config), made := threading.RLock())
    if lock is made:
        weakref.finalize(config, _LOCKS.pop, id(config))
    return lock


class _Uncompiled:
    """Runs what was compiled for training as it was written: a step of one token would compile it again.

    The stance is that of the whole process, so the first of several rollouts sets it, and the last one resets it.
    """

    def __init__(self) -> None:
        self._lock, self._rollouts, self._stance = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._rollouts += 1
            if self._rollouts == 1 and "torch._dynamo" in sys.modules:
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._rollouts -= 1
            if not self._rollouts:
                self._stance.close()


_UNCOMPILED = _Uncompiled()
