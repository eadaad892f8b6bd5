"""GRPO with TRL's stock trainer: LoRA on a base in FP8, and rollouts on the same weights.

    python examples/hf/grpo_lora.py MODEL [--steps 100] [--out runs/grpo]

MODEL is a name on the Hub, or a folder. `fast_inference=True` has `model.generate`, which the trainer calls, complete
prompts with a rollout engine: one copy of the weights, and nothing to send to it after a step.
"""

import argparse
import random
import re
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from octavo import FastLanguageModel, OctavoCallback


def correct(completions: list[str], answer: list[int], **_: object) -> list[float]:
    """1 for a completion whose first number is the sum."""
    first = [re.search(r"\d+", text) for text in completions]
    return [float(found is not None and int(found[0]) == total) for found, total in zip(first, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--completions", type=int, default=8, help="of each prompt, which are compared")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"))
    options = parser.parse_args()

    model, tokenizer = FastLanguageModel.from_pretrained(options.model, load_in_fp8=True, fast_inference=True)
    model = FastLanguageModel.get_peft_model(model, r=options.rank, lora_alpha=options.rank)
    terms = [(random.randrange(10), random.randrange(10)) for _ in range(1024)]
    config = GRPOConfig(
        output_dir=str(options.out),
        max_steps=options.steps,
        learning_rate=2e-5,
        per_device_train_batch_size=8 * options.completions,
        num_generations=options.completions,
        max_completion_length=16,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    data = Dataset.from_list([{"prompt": f"{a} + {b} =", "answer": a + b} for a, b in terms])
    trainer = GRPOTrainer(
        model, correct, config, train_dataset=data, processing_class=tokenizer, callbacks=[OctavoCallback()]
    )
    trainer.train()
    model.save_pretrained(options.out / "adapter")


if __name__ == "__main__":
    main()
