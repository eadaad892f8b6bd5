"""Text from the model of a training run, without the run's data or optimiser."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from octavo.models.bdh import BDH
from octavo.numerics.checks import check_choice, check_positive_int
from octavo.training.checkpoint import list_checkpoints, load_checkpoint
from octavo.training.errors import RunError, UserError
from octavo.training.run_folder import MODEL, check_run, read_settings


def generate_text(
    folder: Path, *, prompt: str, length: int, temperature: float, seed: int, device: str
) -> tuple[str, Path]:
    """Return `length` bytes that the model of a run writes after `prompt`, as text, and the file of the model."""
    check_positive_int("bytes", length)
    check_choice("device", device, ("auto", "cpu", "cuda"))
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature}: must be 0 (the likeliest byte) or more")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device='cuda': torch sees no CUDA device here; use --device cpu")
    target = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))
    settings = read_settings(check_run(folder, "give the folder of a run of octavo train"))
    parameters, source = _parameters(folder)
    model = BDH(settings.shape)
    try:
        model.load_state_dict(parameters)
    except RuntimeError as error:
        raise RunError(f"{source} does not hold the model of {folder}/config.json; restore one of them") from error
    model.to(target).eval()
    tokens = torch.tensor([list(prompt.encode())], device=target)
    generator = torch.Generator(target).manual_seed(seed)
    try:
        with torch.autocast(target.type, torch.bfloat16, enabled=target.type == "cuda"):
            written = model.generate(
                tokens, length, temperature=temperature, generator=generator, context=settings.seq
            )[0, tokens.shape[1] :]
    except FloatingPointError as error:
        raise RunError(
            f"{source}: the model's logits are not finite, as the run has diverged; train it anew"
        ) from error
    return bytes(written.tolist()).decode(errors="replace"), source


def _parameters(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """Return the parameters of a finished run, or of its newest checkpoint."""
    path = folder / MODEL
    checkpoints = list_checkpoints(folder)
    if not path.exists():
        if not checkpoints:
            raise UserError(f"{folder} holds no model yet: no checkpoint was saved; let octavo train go on")
        return load_checkpoint(checkpoints[-1], torch.device("cpu"))[0], checkpoints[-1]
    try:
        return load(path.read_bytes()), path
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read: {error}; octavo train --resume writes it again") from error
