"""What `FastLanguageModel` needs of transformers and PEFT: reading models and tokenizers, making adapters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.hf import decoder, layer
from octavo.nn import planner
from octavo.nn.frozen import FP8FrozenLinear
from octavo.numerics import FP8TrainingConfig

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CHECKPOINTING = (True, False, "unsloth")


def read_model(name: str, *, dtype: torch.dtype, device_map: Any, quantization: Any, options: dict[str, Any]) -> Any:
    """`AutoModelForCausalLM.from_pretrained`, into FP8 if `quantization` says so."""
    from transformers import AutoModelForCausalLM

    if quantization is not None:
        if options.get("quantization_config") is not None:
            raise ValueError(
                "quantization_config with load_in_fp8: both say what becomes of the weights; leave one out"
            )
        options = {**options, "quantization_config": quantization}
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map, **options)


def read_tokenizer(name: str, max_seq_length: int, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    kept = {key: options[key] for key in ("revision", "token", "trust_remote_code", "cache_dir") if key in options}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **kept)
    except (OSError, ValueError) as error:
        if name.startswith(("/", ".", "~")) and not Path(name).exists():
            raise ValueError(f"model_name={name!r}: there is no such folder") from error
        raise ValueError(
            f"{name} has no tokenizer that loads; for the model alone, tokenizer=False ({error})"
        ) from error
    tokenizer.model_max_length = max_seq_length
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def octavo_config(
    granularity: str, fp8: FP8TrainingConfig | None, skip: Sequence[str], fp8_products: bool | None
) -> Any:
    from octavo.hf.quantizer import OctavoConfig

    return OctavoConfig(granularity, fp8, skip, fp8_products)


def install_lora() -> None:
    """Let PEFT know linears frozen in FP8."""
    from octavo.hf import lora

    lora.install()


def fuse(model: Any, config: FP8TrainingConfig | None) -> list[str]:
    """The fused pieces that do not depend on who multiplies: loss in chunks, attention. Returns what was done."""
    if not decoder.is_causal_lm(model):
        return [f"nothing fused: {type(model).__name__} is not one of {', '.join(decoder.FAMILIES)}"]
    done: list[str] = list(getattr(model, "octavo_fused", ())) or fuse_groups(model)
    decoder.fuse_last_norm(model)
    reason = decoder.why_no_loss(model)
    if reason:
        done.append(f"loss not fused: {reason}")
    else:
        frozen = next((m for m in model.modules() if isinstance(m, FP8FrozenLinear)), None)
        in_fp8 = config is not None and config.fp8_head and frozen is not None
        decoder.fuse_loss(model, config if in_fp8 else None, frozen.scaling if in_fp8 and frozen else None)
        high = str(model.lm_head.weight.dtype).removeprefix("torch.")
        done.append(f"head and loss in chunks, head in {'FP8' if in_fp8 else 'BF16' if high == 'bfloat16' else high}")
    if decoder.use_fused_attention(model):
        done.append("attention on cuDNN where it applies")
    return done


def plan_products(model: nn.Module) -> str:
    """Have a frozen base multiply in BF16 where FP8 does not pay. Returns why, if so."""
    modules = dict(model.named_modules())
    together = decoder.outputs_with_group(modules)
    linears = {name: module for name, module in modules.items() if isinstance(module, FP8FrozenLinear)}
    reason = planner.why_not_frozen(
        (linear.in_features, linear.out_features / together.get(name, linear.out_features), linear.out_features)
        for name, linear in linears.items()
    )
    for linear in linears.values():
        linear.in_fp8, linear.is_planned = not reason, True
    return reason


def fuse_groups(model: nn.Module) -> list[str]:
    """q, k and v of a frozen base as one product, its MLP as one function, or at least gate and up as one product.

    All of it gives what the modules would give, one by one. Returns what was done.
    """
    counts: dict[str, int] = {}
    for module in list(model.modules()):
        kind = "q, k and v" if decoder.is_attention(module) else "gate and up" if decoder.is_mlp(module) else ""
        if kind:
            reason = decoder.fuse_frozen(module)
            what = f"{kind} one by one: {reason}" if reason else f"{kind} in one product"
            if not reason and kind == "gate and up":
                alone = decoder.why_no_frozen_mlp(module)
                what = f"{what}, down apart: {alone}" if alone else "MLP with its activation in one function"
            counts[what] = counts.get(what, 0) + 1
    layers = [module for module in model.modules() if layer.can_fuse(module)]
    for module in layers:
        layer.fuse(module)
    if layers:
        counts["norms with the products that follow them"] = len(layers)
    high = sum(isinstance(module, FP8FrozenLinear) and not module.in_fp8 for module in model.modules())
    if high:
        counts["products in high precision, by FP8 weights"] = high
    return [f"{what} ({count})" for what, count in counts.items() if "not all of them are in FP8" not in what]


def add_adapters(
    model: nn.Module, *, checkpointing: bool | str, seed: int, max_seq_length: int | None, options: dict[str, Any]
) -> nn.Module:
    """`peft.get_peft_model`, with gradient checkpointing if asked for."""
    import peft

    autocast = options.pop("autocast_adapter_dtype", True)
    base: Any = model
    if checkpointing:
        # Without an accelerator, checkpoints are in host memory anyway, and there is none to pin.
        base.gradient_checkpointing_enable(offload=checkpointing == "unsloth" and torch.cuda.is_available())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
        adapted = peft.get_peft_model(base, config, autocast_adapter_dtype=autocast)
    if max_seq_length is not None:
        base.max_seq_length = max_seq_length
    return adapted
