"""Load a checkpoint that is in FP8 already into Octavo's layers with `from_pretrained`; then train with plain PEFT.

    python examples/hf/load_prequantized.py MODEL

It reads `quant_method: fp8` (per 128×128 block, or per tensor), and compressed-tensors in FP8 (also per channel).
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from octavo import OctavoConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16, quantization_config=OctavoConfig()
    )
    print(model.model.layers[0].mlp.up_proj)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    ids = torch.randint(model.config.vocab_size, (1, 32), device=model.device)
    model(input_ids=ids, labels=ids).loss.backward()
    moving = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is not None]
    print(f"{len(moving)} adapter matrices have gradients; the base stays as it was read")


if __name__ == "__main__":
    main()
