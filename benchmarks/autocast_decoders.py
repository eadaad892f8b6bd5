"""Does a decoder learn the same under the autocast as converted? Loss of small ones of every family, after 300 steps.

    python benchmarks/autocast_decoders.py [--steps 300] [--families Llama Qwen3] [--out FILE]

The task needs positions: 3 of 4 tokens repeat the one four places before, the rest are random. So the loss has a floor
that is not zero, and attention must find the place. Each run starts from the same weights and sees the same batches:
in high precision, by `octavo.convert_to_fp8`, and under `octavo.fp8_autocast` with its defaults (no `model=`). Runs on
a CPU, where FP8 is emulated. Writes the loss on held-out data and its ratio to that of the converted model; exits with
1 where one is off by more than 2 %. One run of a family says little about 2 %:
converted and high precision differ by more.
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
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
VOCABULARY, LENGTH, DISTANCE = 32, 32, 4
LEARNING_RATE = 6e-3
TOLERANCE = 0.02


def build(family: str) -> Any:
    torch.manual_seed(0)
    config = FAMILIES[family](
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
    )
    attention = "eager" if family == "Gemma2" else "sdpa"
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def batch(seed: int, rows: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)
    repeats = torch.rand((rows, LENGTH), generator=generator) < 0.75
    for t in range(DISTANCE, LENGTH):
        tokens[:, t] = torch.where(repeats[:, t], tokens[:, t - DISTANCE], tokens[:, t])
    return tokens


def train(family: str, run: str, steps: int) -> float:
    """The loss on 64 held-out rows after so many steps of AdamW."""
    model = build(family)
    context: Any = nullcontext()
    if run == "converted":
        octavo.convert_to_fp8(model)
    elif run == "autocast":
        context = octavo.fp8_autocast()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    # Decayed to zero, so that what the last steps happen to do counts for little.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        tokens = batch(step)
        with context:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    tokens = batch(-1, rows=64)
    with torch.no_grad(), context:
        return model.eval()(input_ids=tokens, labels=tokens).loss.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for family in options.families:
        losses = {run: train(family, run, options.steps) for run in RUNS}
        losses["autocast / converted"] = losses["autocast"] / losses["converted"]
        found[family] = losses
        print(f"{family:8}", "  ".join(f"{name} {value:.4f}" for name, value in losses.items()), flush=True)
    if options.out:
        about = {"torch": torch.__version__, "transformers": transformers.__version__, "steps": options.steps}
        options.out.write_text(json.dumps({**about, "losses": found}, indent=1) + "\n")
    return int(any(abs(losses["autocast / converted"] - 1) > TOLERANCE for losses in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
