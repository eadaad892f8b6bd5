"""LoRA on a base in FP8 with TRL's stock trainer.

    python examples/hf/sft_lora.py MODEL [--data texts.txt] [--steps 100] [--out lora]

MODEL is a name on the Hub, or a folder. Its weights are quantised as they are read: one byte a parameter, one copy.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from octavo import FastLanguageModel, OctavoCallback


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, default=Path(argparse.__file__), help="a text; a blank line ends a sample")
    parser.add_argument("--granularity", default="block", choices=("block", "channel", "tensor"))
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    options = parser.parse_args()

    model, tokenizer = FastLanguageModel.from_pretrained(
        str(options.model), max_seq_length=128, load_in_fp8=options.granularity
    )
    model = FastLanguageModel.get_peft_model(model, r=options.rank, lora_alpha=options.rank)
    samples = [text for text in options.data.read_text().split("\n\n") if text.strip()]
    trainer = SFTTrainer(
        model,
        SFTConfig(
            output_dir=str(options.out),
            max_steps=options.steps,
            max_length=128,
            learning_rate=2e-4,
            logging_steps=max(1, options.steps // 10),
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"text": samples}),
        processing_class=tokenizer,
        callbacks=[OctavoCallback()],
    )
    trainer.train()
    model.save_pretrained(options.out / "adapter")  # as PEFT writes it
    FastLanguageModel.save_pretrained_merged(model, options.out / "merged", tokenizer)  # plain BF16


if __name__ == "__main__":
    main()
