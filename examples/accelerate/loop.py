"""A training loop with Accelerate: a tiny Llama learns the bytes of a file of the standard library.

    accelerate launch --config_file examples/accelerate/fp8.yaml examples/accelerate/loop.py

The one line for FP8 is `octavo.watch_environment()`; the launcher's YAML then turns FP8 on or off.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import octavo

SEQUENCE = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", type=Path, help="a folder for the state after the last step")
    options = parser.parse_args()

    octavo.watch_environment()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    rows = text[: len(text) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    for step, batch in zip(range(options.steps), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % 5 == 0 or step == options.steps - 1:
            accelerator.print(f"step {step:4}  loss {loss.item():.3f}")
    if options.save:
        accelerator.save_state(options.save)


if __name__ == "__main__":
    main()
