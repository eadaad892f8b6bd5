"""Export to an FP8 checkpoint that transformers and vLLM read: 128×128 blocks, `weight` and `weight_scale_inv`.

python examples/hf/export.py MODEL OUT
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import octavo


def size(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    octavo.export_fp8(model, options.out)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.1f}M parameters in {size(options.out):.1f} MiB")
    again = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.bfloat16)  # stock transformers
    ids = torch.randint(model.config.vocab_size, (1, 32))
    with torch.no_grad():
        logits, expected = again(ids).logits.float(), model(ids).logits.float()
    agree = torch.nn.functional.cosine_similarity(logits.flatten(), expected.flatten(), dim=0)
    print(f"read back by transformers: logits agree to a cosine of {agree:.4f}")


if __name__ == "__main__":
    main()
