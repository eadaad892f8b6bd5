"""Does a decoder learn the same under the autocast as converted? Losses of small decoders of each family, 300 steps.

    python benchmarks/autocast_decoders.py [--seeds 3] [--families Llama Qwen3] [--device cuda] [--out FILE]

The task is the source of Python's standard library, byte by byte. Each run starts from the same weights and sees the
same batches: in high precision, by `octavo.convert_to_fp8`, and under `octavo.fp8_autocast` with its defaults (no
`model=`). Without a GPU, FP8 is emulated. Writes the loss on held-out text, a mean over `--seeds` orders of the data,
and its ratio to that of the converted model; exits with 1 where one is off by more than 2 %. On a GPU two equal runs
differ by 1 to 2 % (the order of sums), so one seed says little there.

Real text has a loss that falls smoothly. A task in which most tokens repeat the fourth one before was tried first:
there the loss falls at once, when attention finds the place, and rounding decides when that is (docs/LOG.md).
"""

import argparse
import json
import sysconfig
from contextlib import nullcontext
from datetime import date
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers

import octavo

FAMILIES = {
    "Llama": transformers.LlamaConfig,
    "Mistral": transformers.MistralConfig,
    "Qwen2": transformers.Qwen2Config,
    "Qwen3": transformers.Qwen3Config,
    "Gemma": transformers.GemmaConfig,
    "Gemma2": transformers.Gemma2Config,
    "Gemma3": transformers.Gemma3TextConfig,
}
RUNS = ("high precision", "converted", "autocast")
VOCABULARY = 256
LEARNING_RATE = 1e-3
TOLERANCE = 0.02
SHAPES = {  # hidden, layers, rows of a batch, bytes of a row
    "cpu": (64, 2, 16, 64),
    "cuda": (256, 4, 32, 256),
}


def build(family: str, device: str) -> Any:
    torch.manual_seed(0)
    hidden, layers, _, length = SHAPES[device]
    config = FAMILIES[family](
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        vocab_size=VOCABULARY,
        max_position_embeddings=length,
        pad_token_id=None,
    )
    attention = "eager" if family == "Gemma2" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.train().to(device)


@cache
def text(held_out: bool) -> torch.Tensor:
    """Return a megabyte of source text, or the megabyte after it."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    return torch.frombuffer(bytearray(text[2**20 * held_out :][: 2**20]), dtype=torch.uint8)


def batch(seed: int, device: str, *, held_out: bool = False) -> torch.Tensor:
    _, _, rows, length = SHAPES[device]
    data = text(held_out)
    starts = torch.randint(len(data) - length, (rows * (4 if held_out else 1),), generator=_generator(seed))
    return torch.stack([data[start : start + length] for start in starts.tolist()]).long().to(device)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def train(family: str, run: str, steps: int, device: str, seed: int = 0) -> float:
    """Return the loss on held-out text after so many steps of AdamW."""
    model = build(family, device)
    context: Any = nullcontext()
    if run == "converted":
        octavo.convert_to_fp8(model)
    elif run == "autocast":
        context = octavo.fp8_autocast()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    # Decayed to zero, so that what the last steps happen to do counts for little.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        tokens = batch(seed * steps + step, device)
        with context:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    tokens = batch(0, device, held_out=True)
    with torch.no_grad(), context:
        return model.eval()(input_ids=tokens, labels=tokens).loss.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--device", choices=SHAPES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    losses_of: dict[str, dict[str, float]] = {}
    for family in options.families:
        losses = {
            run: fmean(train(family, run, options.steps, options.device, seed) for seed in range(options.seeds))
            for run in RUNS
        }
        losses["autocast / converted"] = losses["autocast"] / losses["converted"]
        losses_of[family] = losses
        print(f"{family:8}", "  ".join(f"{name} {value:.4f}" for name, value in losses.items()), flush=True)
    if options.out:
        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        about = {"date": str(date.today()), "device": device, "torch": torch.__version__, "steps": options.steps}
        about |= {"transformers": transformers.__version__, "seeds": options.seeds}
        options.out.write_text(json.dumps({**about, "losses": losses_of}, indent=1) + "\n")
    return int(any(abs(losses["autocast / converted"] - 1) > TOLERANCE for losses in losses_of.values()))


if __name__ == "__main__":
    raise SystemExit(main())
