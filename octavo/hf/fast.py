"""`FastLanguageModel`: a model from the Hub, or a folder, ready to train in FP8.

    from octavo import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained("meta-llama/Llama-3.1-8B", load_in_fp8=True)
    model = FastLanguageModel.get_peft_model(model, r=32)

`load_in_fp8=True` means the fastest recipe that is safe: per `channel` where weights are frozen, and `delayed` scaling
per tensor where they are trained. A checkpoint that is in FP8 already is taken as it is. What is trained, and what is
in FP8:

| call                                         | weights                           | products          |
| -------------------------------------------- | --------------------------------- | ----------------- |
| `load_in_fp8=True`                           | frozen in FP8, the only copy      | FP8; for adapters |
| `load_in_fp8=True, fp8_products="dgrad"`     | frozen in FP8, the only copy      | FP8 in backward   |
| `load_in_fp8=True, fp8_products=False`       | frozen in FP8, the only copy      | `dtype`           |
| `load_in_fp8=True, full_finetuning=True`     | in `dtype`, FP32 ones trained     | FP8               |
| `full_finetuning=True`                       | in `dtype`, FP32 ones trained     | `dtype`           |
| neither                                      | in `dtype`, frozen; for adapters  | `dtype`           |

`fast_inference=True` is for reinforcement learning: `model.generate` then samples with a rollout engine, on the very
weights that are trained, and `load_in_fp8=True` means `fp8_products="dgrad"`: log-probabilities of the trainer are then
as close to those of the rollout as in BF16. Engines are above this room, so `octavo.FastLanguageModel` is this class
with one method more (`rl/fast.py`).
"""

import inspect
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.convert import convert_to_fp8
from octavo.decoders.choice import check_products, multiply_in_fp8_in_backward
from octavo.decoders.fuse import fuse_loaded
from octavo.hf import export, reading, trl, untrained
from octavo.hf.accelerate import watch_environment
from octavo.nn.frozen import FROZEN_GRANULARITIES, FP8FrozenLinear
from octavo.nn.sharded import own_gpu
from octavo.numerics import FP8TrainingConfig
from octavo.numerics.checks import check_choice, check_positive_int
from octavo.numerics.config import check_config

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CHECKPOINTING = (True, False, "unsloth")
MAX_SEQ_LENGTH = 2048  # unless the model has fewer positions
# `load_in_fp8` to the granularity of frozen weights and the recipe of trained ones. For True, what is fastest: on an
# 8B, LoRA per channel 1.50x (block 1.36x), full fine-tuning with delayed scaling 1.57x (block 1.28x, H200, 2026-11-16).
_FROZEN = {True: "channel", "tensor": "tensor", "channel": "channel", "block": "block"}
_TRAINED = {True: "delayed", "tensor": "delayed", "channel": "channel", "block": "block"}
ENGINES = ("vllm", "native")
# Arguments for adapters in scripts for other libraries, with the values that ask for nothing.
_FOREIGN = {
    "finetune_vision_layers": False, "finetune_language_layers": True, "finetune_attention_modules": True,
    "finetune_mlp_modules": True, "qat_scheme": None, "task_type": "CAUSAL_LM",
}  # fmt: skip
_STANDBY = ("OCTAVO_STANDBY", "UNSLOTH_VLLM_STANDBY")  # the second is what scripts bring along


@dataclass(frozen=True)
class Rollouts:
    """The rollout engine that a model is to have.

    Fields:
        engine: "vllm" or "native"; None is vLLM if it is installed.
        max_lora_rank: the highest rank of adapters.
        memory_share: of the device's memory, which bounds the engine's cache.
        standby: give the cache's memory back after each rollout, for the time of training.
    """

    engine: str | None = None
    max_lora_rank: int = 64
    memory_share: float = 0.6
    standby: bool = False

    def __post_init__(self) -> None:
        if self.engine is not None:
            check_choice("engine", self.engine, ENGINES)


class FastLanguageModel:
    """Loading and adapting causal language models. Nothing to instantiate."""

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        max_seq_length: int | None = None,
        dtype: torch.dtype | None = None,
        load_in_fp8: bool | str = False,
        load_in_4bit: bool = False,
        load_in_8bit: bool = False,
        full_finetuning: bool = False,
        fast_inference: bool = False,
        max_lora_rank: int = 64,
        gpu_memory_utilization: float = 0.6,
        *,
        engine: str | None = None,
        fp8_config: FP8TrainingConfig | str | None = None,
        skip: Sequence[str] = (),
        fp8_products: bool | str | None = None,
        device_map: Any = None,
        tokenizer: bool = True,
        master_weights: bool = True,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """The model and its tokenizer (None with `tokenizer=False`).

        `max_seq_length`: that of the tokenizer, and of TRL's trainers unless their configuration says otherwise; not
        given, 2,048 or what the model has positions for, and the trainers keep their own.
        `load_in_fp8`: True (the fastest: see above), "block", "channel" or "tensor". Weights are quantised as they are
        read, so memory stays near one byte a parameter. `model.octavo_report` says what is in FP8, and what is not and
        why. `fp8_config` says how inputs and gradients are quantised, `skip` which linears are left alone.
        `fp8_products=False`: weights in FP8 are dequantised for each product, which is then in `dtype`: closer to it,
        slower for all but small models, and with more activations. `"dgrad"`: so in forward, and FP8 in backward. Not
        given: on a GPU, what is faster; elsewhere, and with an `fp8_config` that has them quantised in another way than
        by default, FP8; with `fast_inference`, and without an `fp8_config`, in backward alone.
        `master_weights`: with `full_finetuning`, whatever optimiser steps the BF16 weights steps FP32 ones, of which it
        keeps the lower halves (2 bytes a weight) and FP32 means; False lets each step round to BF16.
        `dtype`: BF16 unless given. Anything else goes to transformers' `from_pretrained`.
        `model_name`: adapters come with the model that they are for, and go on to be trained.
        `fast_inference`: `model.generate`, and `model.fast_generate`, sample with a rollout engine on these weights:
        `engine="vllm"` or `"native"`; not given, vLLM if it is installed. `max_lora_rank`: the highest `r` for
        `get_peft_model`. `gpu_memory_utilization`: share of the memory that the engine may fill with its cache. With
        OCTAVO_STANDBY=1 or UNSLOTH_VLLM_STANDBY=1 in the environment, the cache is freed while the model trains.
        """
        fp8_config = None if fp8_config is None else check_config(fp8_config)
        _check_loading(load_in_fp8, load_in_4bit, load_in_8bit, fp8_config)
        if max_seq_length is not None:
            check_positive_int("max_seq_length", max_seq_length)
        check_positive_int("max_lora_rank", max_lora_rank)
        _check_products(fp8_products, load_in_fp8, full_finetuning, fp8_config)
        _check_recipe(load_in_fp8, full_finetuning, fp8_config)
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={gpu_memory_utilization!r}: a share of the memory, above 0 to 1")
        if engine is not None and not fast_inference:
            raise ValueError(f"engine={engine!r} with fast_inference=False: nothing would use it; set fast_inference")
        rollouts = Rollouts(engine, max_lora_rank, gpu_memory_utilization, _stands_by()) if fast_inference else None
        watch_environment(fp8_config)  # ACCELERATE_MIXED_PRECISION=fp8, set before or after, means Octavo from here on
        if device_map is None and torch.cuda.is_available():
            device_map = {"": own_gpu()}
        model_name = os.path.expanduser(model_name)  # noqa: PTH111  # pathlib would make `name` of `./name`
        reading.check_name(model_name, kwargs)
        adapters = reading.read_adapter_config(model_name, kwargs)
        base, options = None, kwargs
        if adapters is not None:
            base, options = reading.base_of_adapters(model_name, adapters, kwargs)
        if base is not None and full_finetuning:
            raise ValueError(
                f"model_name={model_name!r} with full_finetuning=True: these are adapters; merge them first "
                "(save_pretrained_merged), or leave full_finetuning out"
            )
        words = None
        if tokenizer:
            place = reading.place_of_tokenizer(model_name, base, kwargs)
            words = reading.read_tokenizer(place, kwargs if place == model_name else options)
        if rollouts is not None:
            cls._check_engine(base or model_name, rollouts, options)
        dtype = dtype or torch.bfloat16
        frozen_fp8 = bool(load_in_fp8) and not full_finetuning
        quantization = None
        if frozen_fp8:
            from octavo.hf.quantizer import OctavoConfig  # not before: it registers itself with transformers

            quantization = OctavoConfig(_FROZEN[load_in_fp8], fp8_config, skip, fp8_products)
        model = reading.read_model(
            base or model_name,
            dtype=dtype,
            device_map=device_map,
            quantization=quantization,
            options=options,
            arguments=list(inspect.signature(cls.from_pretrained).parameters),
        )
        if frozen_fp8 and load_in_fp8 is not True:
            _check_granularity(model, str(load_in_fp8))
        if full_finetuning and load_in_fp8:
            config = fp8_config or FP8TrainingConfig.from_recipe(_TRAINED[load_in_fp8])
            convert_to_fp8(model, config.replace(skip=_with(config.skip, skip)))
        else:
            fuse_loaded(model)
        if not frozen_fp8:  # else what the checkpoint has is frozen, and what it lacks is not
            model.requires_grad_(full_finetuning)
        if full_finetuning:
            untrained.remember_masters(model, master_weights)
        untrained.explain_untrained(model)
        trl.install()
        export.add_saving()
        model.octavo_revision = options.get("revision")
        _set_length(model, words, max_seq_length)
        if rollouts is not None:
            if frozen_fp8 and fp8_config is None and model.config.quantization_config.fp8_products is None:
                multiply_in_fp8_in_backward(model)
            model.octavo_rollouts = rollouts
            cls._add_engine(model, words, rollouts)
        if base is not None:
            from octavo.hf.lora import load_adapters

            most = rollouts.max_lora_rank if rollouts is not None else None
            model = load_adapters(model, model_name, most, reading.hub_options(kwargs))
        return model, words

    @classmethod
    def _check_engine(cls, model_name: str, rollouts: Rollouts, options: dict[str, Any]) -> None:
        """Refuse a model that no engine would take, before its weights are read."""

    @classmethod
    def _add_engine(cls, model: Any, tokenizer: Any, rollouts: Rollouts) -> None:  # noqa: ARG003
        raise ValueError("fast_inference=True: this class only loads; octavo.FastLanguageModel has rollout engines")

    @staticmethod
    def get_peft_model(
        model: nn.Module,
        r: int = 16,
        target_modules: Sequence[str] | str = LINEARS,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        bias: str = "none",
        use_gradient_checkpointing: bool | str = True,
        random_state: int = 3407,
        max_seq_length: int | None = None,
        use_rslora: bool = False,
        modules_to_save: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model with LoRA adapters, which alone are trained.

        `use_gradient_checkpointing`: "unsloth" keeps the checkpoints in pinned host memory. Anything else goes to
        `peft.LoraConfig`. A model that has adapters of this very kind keeps them, with their values.
        """
        check_positive_int("r", r)
        if max_seq_length is not None:
            check_positive_int("max_seq_length", max_seq_length)
        kwargs = _without_foreign(kwargs)
        if type(random_state) is not int:
            raise ValueError(f"random_state={random_state!r}: a whole number, of which the adapters' first values come")
        rollouts: Rollouts | None = getattr(model, "octavo_rollouts", None)
        if rollouts is not None and r > rollouts.max_lora_rank:
            raise ValueError(
                f"r={r} with max_lora_rank={rollouts.max_lora_rank}: the engine of this model was to expect no more; "
                f"load it with max_lora_rank={r}"
            )
        if use_gradient_checkpointing not in CHECKPOINTING:
            raise ValueError(f"use_gradient_checkpointing={use_gradient_checkpointing!r}: True, False or 'unsloth'")
        if not isinstance(lora_dropout, (int, float)) or not 0 <= lora_dropout < 1:
            raise ValueError(f"lora_dropout={lora_dropout!r}: a probability below 1")
        if not isinstance(lora_alpha, (int, float)) or not 0 < lora_alpha < math.inf:
            raise ValueError(f"lora_alpha={lora_alpha!r}: a positive number")
        from octavo.hf.kept_adapters import has_adapters, keep_adapters  # which need PEFT; models load without it
        from octavo.hf.lora import add_adapters

        is_adapted = has_adapters(model)
        if not is_adapted:
            _check_targets(model, target_modules)
        options = {
            "r": r,
            "target_modules": target_modules if isinstance(target_modules, str) else list(target_modules),
            "lora_alpha": lora_alpha,
            "lora_dropout": lora_dropout,
            "bias": bias,
            "use_rslora": use_rslora,
            "modules_to_save": None if modules_to_save is None else list(modules_to_save),
            **kwargs,
        }
        adapted: Any
        if is_adapted:
            adapted = keep_adapters(model, use_gradient_checkpointing, options)
        else:
            adapted = add_adapters(model, checkpointing=use_gradient_checkpointing, seed=random_state, options=options)
        if max_seq_length is not None:
            _set_length(adapted.get_base_model(), None, max_seq_length)
        return adapted

    @staticmethod
    def save_pretrained_merged(
        model: nn.Module,
        save_directory: str | Path,
        tokenizer: Any = None,
        save_method: str = "merged_16bit",
        maximum_memory_usage: float | None = None,  # noqa: ARG004
    ) -> Path:
        """Write the model with its adapters merged in: `merged_16bit` (BF16) or `merged_fp8`. It stays as it is.

        `maximum_memory_usage` is an argument of other libraries' scripts, and without effect.
        `save_method="lora"` writes the adapters alone, as PEFT does. Of a sharded model (FSDP2), every rank calls this,
        and rank 0 writes.
        """
        return export.save_merged(model, save_directory, save_method, tokenizer=tokenizer)

    @staticmethod
    def for_training(model: nn.Module, use_gradient_checkpointing: bool | str = True) -> nn.Module:  # noqa: ARG004
        """The model in training mode. Checkpointing stays as `get_peft_model` was asked for."""
        return model.train()

    @staticmethod
    def for_inference(model: nn.Module) -> nn.Module:
        return model.eval()


def _stands_by() -> bool:
    """Whether the environment asks for standby, now."""
    for name in _STANDBY:
        value = os.environ.get(name, "0")
        if value not in ("0", "1"):
            raise ValueError(f"{name}={value}: 1 frees the engine's cache while the model trains, 0 does not")
    return any(os.environ.get(name) == "1" for name in _STANDBY)


def _check_loading(load_in_fp8: bool | str, load_in_4bit: bool, load_in_8bit: bool, fp8_config: Any) -> None:
    if isinstance(load_in_fp8, str):
        check_choice("load_in_fp8", load_in_fp8, FROZEN_GRANULARITIES)
    elif not isinstance(load_in_fp8, bool):
        raise TypeError(f"load_in_fp8={load_in_fp8!r}: True, False, 'block', 'channel' or 'tensor'")
    for name, value in (("load_in_4bit", load_in_4bit), ("load_in_8bit", load_in_8bit)):
        if value and load_in_fp8:
            raise ValueError(f"{name}=True with load_in_fp8={load_in_fp8!r}: a weight has one precision; leave one out")
        if value:
            raise ValueError(f"{name}=True: Octavo loads FP8 (load_in_fp8=True) or high precision; leave it out")
    if fp8_config is not None and not load_in_fp8:
        raise ValueError("fp8_config is given but load_in_fp8=False: nothing would run in FP8; set load_in_fp8")


def _check_recipe(load_in_fp8: bool | str, full_finetuning: bool, fp8_config: FP8TrainingConfig | None) -> None:
    """Raise if the scales of trained weights are named twice, and differently."""
    if full_finetuning and fp8_config is not None and isinstance(load_in_fp8, str):
        granularity = fp8_config.granularity
        if granularity != load_in_fp8:
            raise ValueError(
                f"load_in_fp8={load_in_fp8!r} with fp8_config.granularity={granularity!r} and full_finetuning=True: "
                "both say what scales the weights have; set load_in_fp8=True, or leave fp8_config out"
            )


def _set_length(model: Any, tokenizer: Any, asked: int | None) -> None:
    """Give a model the length of sequences that is asked for, or 2,048."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and asked is not None and asked > limit:
        raise ValueError(
            f"max_seq_length={asked}: {type(model).__name__} of {model.name_or_path} has {limit} positions"
        )
    length = min(MAX_SEQ_LENGTH, limit or MAX_SEQ_LENGTH) if asked is None else asked
    model.max_seq_length = length
    model.octavo_asked_length = asked
    if tokenizer is not None:
        tokenizer.model_max_length = length


def _check_products(fp8_products: Any, load_in_fp8: bool | str, full_finetuning: bool, fp8_config: Any) -> None:
    check_products(fp8_products)
    if fp8_products is True and not load_in_fp8:
        raise ValueError("fp8_products=True with load_in_fp8=False: nothing would run in FP8; set load_in_fp8")
    if fp8_products is True or fp8_products is None:
        return
    if not load_in_fp8 or full_finetuning:
        raise ValueError(
            f"fp8_products={fp8_products!r} is for a base frozen in FP8: with load_in_fp8, without full_finetuning"
        )
    if fp8_products is False and fp8_config is not None:
        raise ValueError(
            "fp8_config with fp8_products=False: it says how products are quantised; leave one of them out"
        )


def _without_foreign(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `get_peft_model` without those of other libraries that ask for nothing; others raise."""
    for name, value in kwargs.items():
        if name in _FOREIGN and value != _FOREIGN[name]:
            fix = "name the linears by target_modules" if name.startswith("finetune_") else "leave it out"
            raise ValueError(f"{name}={value!r}: not an argument of Octavo's get_peft_model; {fix}")
    return {name: value for name, value in kwargs.items() if name not in (*_FOREIGN, "temporary_location")}


def _check_granularity(model: nn.Module, asked: str) -> None:
    granularities = {module.granularity for module in model.modules() if isinstance(module, FP8FrozenLinear)}
    if granularities - {asked}:
        raise ValueError(
            f"load_in_fp8={asked!r}: the checkpoint is in FP8 already, per {' and '.join(sorted(granularities))}; "
            "load_in_fp8=True takes it as it is"
        )


def _check_targets(model: nn.Module, targets: Any) -> None:
    """Raise for a name that matches no module; PEFT minds only if none of them does."""
    if isinstance(targets, str):  # a pattern, or all-linear: PEFT's to judge
        return
    if not isinstance(targets, (list, tuple, set, frozenset)):
        raise ValueError(f"target_modules={targets!r}: names of linears, such as {list(LINEARS)}")
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ValueError(f"target_modules: {target!r} is no module of {type(model).__name__}")


def _with(skip: Sequence[str], more: Sequence[str]) -> tuple[str, ...]:
    return (*skip, *((more,) if isinstance(more, str) else more))
