"""Reading models and tokenizers by transformers, with errors that name the mistake."""

import difflib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


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
    """Raise if there is no such model, before anything else is said about it."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / "octavo-run.json").exists():
            found = [str(folder / part) for part in ("adapter", "model") if (folder / part).is_dir()]
            where = f"; what it has trained is in {' and '.join(found)}" if found else ", which has no model yet"
            raise ValueError(f"model_name={name!r}: the folder of a run of Octavo{where}")
        if not any((folder / file).exists() for file in ("config.json", "adapter_config.json")):
            raise ValueError(f"model_name={name!r}: a folder without config.json, so none of a model")
        return
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ValueError(f"model_name={name!r}: there is no such folder")
    files: Any = ("config.json", "adapter_config.json")
    try:
        there = any(_is_there(name, file, options) for file in files)
        why = "it has no config.json, or there is no connection and no copy in the cache"
    except OSError as error:
        there, why = False, str(error)
    if not there:
        raise ValueError(f"model_name={name!r}: no folder here, and no model on the Hub that can be had: {why}")


def read_adapter_config(name: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration of the adapters in a folder or a repository of the Hub; None if it has none."""
    from transformers.utils import find_adapter_config_file

    found = find_adapter_config_file(name, **hub_options(options))
    if found is None:
        return None
    config = None
    with suppress(ValueError):
        config = json.loads(Path(found).read_text())
    if not isinstance(config, dict):
        raise ValueError(f"model_name={name!r}: its adapter_config.json is no JSON object; restore it")
    return config


def base_of_adapters(name: str, config: dict[str, Any], options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of the model that adapters are for, and the options to read it with: its revision is its own.

    `config`: of the adapters. `options`: to read these with.
    """
    base: str | None = config.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"model_name={name!r}: adapters whose adapter_config.json names no base_model_name_or_path")
    own = {key: value for key, value in options.items() if key != "revision"}
    if config.get("revision"):
        own["revision"] = config["revision"]
    try:
        check_name(base, own)
    except ValueError as error:
        raise ValueError(f"model_name={name!r}: adapters, and their model is not there: {error}") from error
    return base, own


def place_of_tokenizer(name: str, base: str | None, options: dict[str, Any]) -> str:
    """The name to load a tokenizer by: that of the model `base` for adapters without a tokenizer."""
    if base is None:
        return name
    files = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
    return name if any(_is_there(name, file, options) for file in files) else base


def hub_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of some options that say where on the Hub, or in its cache, files are."""
    return {name: options[name] for name in ("revision", "token", "cache_dir", "local_files_only") if name in options}


def _is_there(name: str, file: str, options: dict[str, Any]) -> bool:
    """Whether a folder, or a repository of the Hub, has a file. Raises OSError if there is no such repository."""
    from transformers.utils.hub import cached_file

    return cached_file(name, file, _raise_exceptions_for_missing_entries=False, **hub_options(options)) is not None


def read_config(name: str, **options: Any) -> Any:
    """The configuration of a model. Raises OSError or ValueError, also for one that transformers finds invalid."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, **options)
    except (StrictDataclassError, TypeError, AttributeError) as error:  # the last two: config.json is no object
        raise ValueError(f"config.json is not valid: {' '.join(str(error).split())}") from error


def causal_class(name: str, options: dict[str, Any]) -> str | None:
    """The class that `AutoModelForCausalLM` takes for a model; None if that is the model's own code."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = read_config(name, trust_remote_code=False, **hub_options(options))
    found: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return found


def read_tokenizer(name: str, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    trust = {key: options[key] for key in ("trust_remote_code",) if key in options}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **trust, **hub_options(options))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} has no tokenizer that loads; for the model alone, tokenizer=False ({error})"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
