"""Full fine-tuning with products in FP8 in transformers' stock Trainer. Weights are in BF16, with FP32 masters.

python examples/hf/sft_full.py MODEL [--data text.txt] [--steps 100] [--out full]
"""

import argparse
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from octavo import FastLanguageModel, OctavoCallback

LENGTH = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, default=Path(argparse.__file__), help="a text")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/full"))
    options = parser.parse_args()

    model, tokenizer = FastLanguageModel.from_pretrained(
        str(options.model), max_seq_length=LENGTH, load_in_fp8=True, full_finetuning=True
    )
    print(model.octavo_report)
    ids = tokenizer(options.data.read_text(), truncation=False)["input_ids"]
    rows = [
        {"input_ids": ids[i : i + LENGTH], "labels": ids[i : i + LENGTH]} for i in range(0, len(ids) - LENGTH, LENGTH)
    ]
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(options.out),
            max_steps=options.steps,
            per_device_train_batch_size=4,
            learning_rate=2e-5,
            bf16=True,  # what is not a product
            logging_steps=max(1, options.steps // 10),
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
        ),
        train_dataset=rows,
        callbacks=[OctavoCallback()],
    )
    trainer.train()
    model.save_pretrained(options.out / "bf16")
    tokenizer.save_pretrained(options.out / "bf16")


if __name__ == "__main__":
    main()
