"""FSDP2 in a loop of your own: a tiny Llama in FP8, in shards, with a checkpoint that any number of ranks resumes.

    torchrun --nproc-per-node 8 examples/fsdp2.py --folder runs/fsdp2       # again, to go on where it ended
    python examples/fsdp2.py --folder runs/fsdp2                            # the same checkpoint, in one process

The order: convert, shard, build the optimiser, load.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import octavo
from octavo.dist import checkpoint

SEQUENCE = 64


def main(folder: Path, steps: int, save_every: int) -> list[float]:
    on_gpu = torch.cuda.is_available()
    launched = "RANK" in os.environ
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if launched and not distributed.is_initialized():
        distributed.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if launched else (0, 1)

    torch.manual_seed(0)  # the same weights on every rank
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=256)).to("cuda" if on_gpu else "cpu")
    report = octavo.convert_to_fp8(model)
    if rank == 0:
        print(report.summary())
    if launched:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    saved = sorted(folder.glob("step-????"))  # folders with another ending were not finished
    done = checkpoint.load(saved[-1], model, optimizer).extra["step"] if saved else 0

    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    losses = []
    for step in range(done, done + steps):
        # A batch is a function of step and rank, so there is no state of a data loader to save.
        generator = torch.Generator().manual_seed(step * ranks + rank)
        starts = torch.randint(len(text) - SEQUENCE, (8, 1), generator=generator)
        batch = text[starts + torch.arange(SEQUENCE)].to(model.device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step + 1}  loss of rank 0 {losses[-1]:.4f}")
        if (step + 1) % save_every == 0:
            checkpoint.save(folder / f"step-{step + 1:04d}", model, optimizer, extra={"step": step + 1})
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/fsdp2"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()
    main(options.folder, options.steps, options.save_every)
    if distributed.is_initialized():
        distributed.destroy_process_group()
