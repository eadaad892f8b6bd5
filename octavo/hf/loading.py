"""What `FastLanguageModel` needs of transformers and PEFT: reading models and tokenizers, making adapters."""

import difflib
import importlib.util
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.hf import decoder, export, layer
from octavo.nn import cost_model
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.report import FP8
from octavo.numerics import FP8TrainingConfig
from octavo.optim import keep_masters
from octavo.optim.split_masters import is_decided

_MASTERS = "octavo_master_weights"

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CHECKPOINTING = (True, False, "unsloth")


def read_model(
    name: str,
    *,
    dtype: torch.dtype,
    device_map: Any,
    quantization: Any,
    options: dict[str, Any],
    arguments: Sequence[str] = (),
) -> Any:
    """`AutoModelForCausalLM.from_pretrained`, into FP8 if `quantization` says so.

    `arguments`: those that would not have ended up in `options`, had they been spelt right.
    """
    from transformers import AutoModelForCausalLM

    if quantization is not None:
        if options.get("quantization_config") is not None:
            raise ValueError(
                "quantization_config with load_in_fp8: both say what becomes of the weights; leave one out"
            )
        options = {**options, "quantization_config": quantization}
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map, **options)
    except TypeError as error:  # from the model's class, which gets what nobody else has taken
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in options:
            raise
        close = difflib.get_close_matches(unknown[1], arguments, n=1)
        raise TypeError(
            f"{unknown[1]}={options[unknown[1]]!r}: no argument of FastLanguageModel.from_pretrained, of transformers' "
            f"from_pretrained, or of this model's configuration{f'; {close[0]} is meant?' if close else ''}"
        ) from error


def check_name(name: str, options: dict[str, Any]) -> None:
    """Whether there is such a model at all, before anything else is said about it."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not any((folder / file).exists() for file in ("config.json", "adapter_config.json")):
            raise ValueError(f"model_name={name!r}: a folder without config.json, so none of a model")
        return
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ValueError(f"model_name={name!r}: there is no such folder")
    from transformers.utils.hub import cached_file

    found = {key: options[key] for key in ("revision", "token", "cache_dir", "local_files_only") if key in options}
    files: Any = ("config.json", "adapter_config.json")
    try:
        there = any(cached_file(name, file, _raise_exceptions_for_missing_entries=False, **found) for file in files)
        why = "it has no config.json, or there is no connection and no copy in the cache"
    except OSError as error:
        there, why = False, str(error)
    if not there:
        raise ValueError(f"model_name={name!r}: no folder here, and no model on the Hub that can be had: {why}")


def read_tokenizer(name: str, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    kept = {key: options[key] for key in ("revision", "token", "trust_remote_code", "cache_dir") if key in options}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **kept)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} has no tokenizer that loads; for the model alone, tokenizer=False ({error})"
        ) from error
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


def install_in_trl() -> None:
    if importlib.util.find_spec("trl") is not None:
        from octavo.hf import trl

        trl.install()


@cache
def add_saving() -> None:
    """Give transformers' models the methods that scripts for merged checkpoints call, of them or through PEFT."""
    from transformers import PreTrainedModel

    def save_pretrained_merged(
        self: nn.Module, save_directory: str | Path, tokenizer: Any = None, save_method: str = "merged_16bit"
    ) -> Path:
        """Write the model with its adapters merged in: see `FastLanguageModel.save_pretrained_merged`."""
        return export.save_merged(self, save_directory, save_method, tokenizer=tokenizer)

    cls: Any = PreTrainedModel
    cls.save_pretrained_merged = save_pretrained_merged
    for name, fix in _NOT_WRITTEN.items():
        setattr(cls, name, _refused(name, fix))


_NOT_WRITTEN = {
    "save_pretrained_gguf": "save_pretrained_merged(folder), then convert_hf_to_gguf.py of llama.cpp on that folder",
    "push_to_hub_gguf": "save_pretrained_merged(folder), then convert_hf_to_gguf.py of llama.cpp on that folder",
    "push_to_hub_merged": "save_pretrained_merged(folder), then huggingface_hub.upload_folder(folder_path=folder, ...)",
}


def _refused(name: str, fix: str) -> Any:
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name}: Octavo writes safetensors into a folder; call {fix}")

    return method


def explain_untrained(model: nn.Module) -> None:
    """Have the backward of a loss that nothing was trained for say so, in place of torch's `does not require grad`."""
    if _explain not in model._forward_hooks.values():
        model.register_forward_hook(_explain)


def remember_masters(model: nn.Module, keep: bool) -> None:
    """Have BF16 weights stepped through FP32 masters, or not; also those of a copy, and in another process."""
    model.__dict__[_MASTERS] = keep
    keep_masters(model.parameters(), keep)


def _explain(model: nn.Module, _inputs: Any, output: Any) -> None:
    masters = model.__dict__.get(_MASTERS)
    if masters is not None and not all(map(is_decided, model.parameters())):
        # A copy has other Parameters, and so has an embedding that was made larger.
        keep_masters((p for p in model.parameters() if not is_decided(p)), masters)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor) and torch.is_grad_enabled() and not loss.requires_grad:
        output.loss = _Untrained.apply(loss, torch.zeros((), requires_grad=True), type(model).__name__)


class _Untrained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, _trained: Tensor, name: str) -> Tensor:
        ctx.name = name
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> None:
        raise ValueError(decoder.nothing_is_trained(ctx.name))


def fuse(model: Any) -> list[str]:
    """The fused pieces that do not depend on who multiplies: loss in chunks, attention. Returns what was done.

    The head of a base frozen in FP8 is in FP8 if the configuration of its linears says so.
    """
    report = model.__dict__.get("octavo_report")
    done: list[str] = fuse_groups(model) if report is None else report.fused
    if not decoder.is_causal_lm(model):
        done.append(f"nothing fused: {type(model).__name__} is not one of {', '.join(decoder.FAMILIES)}")
        return done
    decoder.fuse_last_norm(model)
    reason = decoder.why_no_loss(model)
    if reason:
        done.append(f"loss not fused: {reason}")
    else:
        frozen = next((m for m in model.modules() if isinstance(m, FP8FrozenLinear)), None)
        config = frozen.config if frozen is not None and frozen.config.fp8_head else None
        decoder.fuse_loss(model, config, None if frozen is None else frozen.scaling)
        high = str(model.lm_head.weight.dtype).removeprefix("torch.")
        done.append(f"head and loss in chunks, head in {'FP8' if config else 'BF16' if high == 'bfloat16' else high}")
        if report is not None and config is not None:
            for entry in (entry for entry in report.entries if entry.name == "lm_head"):
                entry.precision, entry.reason, entry.op = FP8, "", "head"
                entry.formats = str(decoder.head_recipe(config))
    if decoder.use_fused_attention(model):
        done.append("attention on cuDNN where it applies")
    return done


def plan_products(model: nn.Module) -> str:
    """Have a frozen base multiply in BF16 where FP8 does not pay. Returns why, if so."""
    modules = dict(model.named_modules())
    together = decoder.outputs_with_group(modules)
    linears = {name: module for name, module in modules.items() if isinstance(module, FP8FrozenLinear)}
    reason = cost_model.why_not_frozen(
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
        base.max_seq_length = base.octavo_asked_length = max_seq_length
    return adapted
