"""Cost of loading into FP8: memory and seconds, and proof that the loaded model trains.

    python benchmarks/load.py --preset 8b --out load.json

A random checkpoint of the preset's shape is written once, in BF16 and shards of 2 GB, to memory (/dev/shm) if it has
room. Then `FastLanguageModel.from_pretrained` loads it in a fresh process for each way asked for (`bf16` is without
FP8), and trains LoRA adapters of rank 32 for two steps of 512 tokens. Peaks of the device are torch's; `device_used` is
what the driver says right after loading, CUDA's own context and other processes included. The host's peak counts pages
of the checkpoint that are mapped; `host_own` is without them, right after loading.
"""

import argparse
import datetime
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.numerics.checks import check_choice
from octavo.tools.bench.random_model import build_causal_lm
from octavo.tools.bench.result import device_name, versions, without_folders
from octavo.tools.shapes import LLAMAS
from octavo.training.files import write_json

WAYS = ("bf16", "block", "channel", "tensor")
SHARD_BYTES = 2 * 10**9
ROOM = 1.05  # times the checkpoint
SEQUENCE, STEPS, RANK = 512, 2, 32
LEARNING_RATE = 1e-3
INIT_STD = 0.02
WRITERS = 4
MEMORY = Path("/dev/shm")


def shards(shapes: dict[str, torch.Size], limit: int) -> Iterator[list[str]]:
    """Return the tensor names of each file: in order, up to `limit` bytes, or a single larger one."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        new = 2 * shape.numel()
        if names and size + new > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += new
    yield names


def tensors_of(preset: str) -> tuple[Any, dict[str, torch.Size]]:
    """Return the configuration, and the shape of every tensor."""
    values = LLAMAS[preset]
    model: Any = build_causal_lm(values, layers=values["num_hidden_layers"], positions=SEQUENCE, device="meta")
    return model.config, {name: tensor.shape for name, tensor in model.state_dict().items()}


def random_tensor(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return ones for norms, and random values as in an initialisation for matrices."""
    made = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return made.fill_(1.0) if "norm" in name else made.normal_(0.0, INIT_STD, generator=generator)


def write_checkpoint(folder: Path, preset: str, device: str, limit: int = SHARD_BYTES) -> dict[str, Any]:
    """Write a checkpoint as Hugging Face does. At most `WRITERS` shards are in memory."""
    start = time.perf_counter()
    config, shapes = tensors_of(preset)
    parts = list(shards(shapes, limit))
    files = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]

    def write(number: int) -> None:
        generator = torch.Generator(device).manual_seed(number)
        tensors = {name: random_tensor(name, shapes[name], generator).cpu() for name in parts[number]}
        save_file(tensors, folder / files[number], metadata={"format": "pt"})

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(len(parts))))
    weight_map = {name: file for file, names in zip(files, parts, strict=True) for name in names}
    parameters = sum(shape.numel() for shape in shapes.values())
    index = {"metadata": {"total_size": 2 * parameters}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    seconds = time.perf_counter() - start
    return {"parameters": parameters, "bytes": 2 * parameters, "shards": len(files), "seconds": seconds}


def choose_folder(size: int) -> Path:
    """Return a folder in memory if it has room, else on the disk."""
    for folder in (MEMORY, Path(tempfile.gettempdir())):
        if folder.is_dir() and shutil.disk_usage(folder).free > ROOM * size:
            return folder
    sys.exit(f"load.py: no room for {size / 1e9:.1f} GB in {MEMORY} or {tempfile.gettempdir()}; give a --folder")


def load_and_train(folder: Path, way: str, device: str) -> dict[str, Any]:
    import transformers.models.llama.modeling_llama  # noqa: F401 - seconds of importing are not those of loading

    import octavo.hf.quantizer  # noqa: F401 - nor are these
    from octavo import FastLanguageModel

    if device == "cuda":
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    model, _ = FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=SEQUENCE,
        load_in_fp8=False if way == "bf16" else way,
        device_map={"": device},
        tokenizer=False,
    )
    synchronize(device)
    loading = {"seconds": time.perf_counter() - start, **memory(device)}
    weights = sum(weight.nbytes for weight in model.parameters())

    model = FastLanguageModel.for_training(FastLanguageModel.get_peft_model(model, r=RANK))
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in adapters.items()}
    optimizer = torch.optim.AdamW(adapters.values(), lr=LEARNING_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (1, SEQUENCE), generator=generator).to(device)
    losses = []
    start = time.perf_counter()
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    training = {
        "seconds": time.perf_counter() - start,
        "losses": losses,
        "adapters": len(adapters),
        "adapters_moved": sum(not torch.equal(p, before[name]) for name, p in adapters.items()),
        **memory(device),
    }
    return {"way": way, "weights_bytes": weights, "loading": loading, "training": training}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def memory(device: str) -> dict[str, int]:
    """Return memory figures of this process, in bytes: peaks and what is in use."""
    status = Path("/proc/self/status").read_text()
    own = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    figures = {
        "host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "host_own": int(own[1]) * 1024 if own else 0,
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        figures |= {
            "device_peak_allocated": torch.cuda.max_memory_allocated(),
            "device_peak_reserved": torch.cuda.max_memory_reserved(),
            "device_used": total - free,
        }
    return figures


def in_a_fresh_process(task: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run `write`, or a way to load, in a new process, since one that has used the GPU keeps memory there."""
    command = [sys.executable, __file__, "--task", task, "--folder", str(folder)]
    command += ["--preset", options.preset, "--device", options.device]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"load.py: {task}: exit code {run.returncode}")
    return json.loads(run.stdout.splitlines()[-1])


def line(row: dict[str, Any], checkpoint: dict[str, Any]) -> str:
    loading, training = row["loading"], row["training"]
    peak = loading.get("device_peak_allocated", loading["host_peak"])
    return (
        f"{row['way']:8} {loading['seconds']:6.1f} s   weights {row['weights_bytes'] / 1e9:6.2f} GB   peak "
        f"{peak / 1e9:6.2f} GB ({peak / checkpoint['bytes']:.2f} of the checkpoint)   losses "
        f"{', '.join(f'{loss:.3f}' for loss in training['losses'])}   "
        f"{training['adapters_moved']} of {training['adapters']} adapters moved"
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="8b", choices=list(LLAMAS))
    parser.add_argument("--ways", default="block,channel", help=f"of {', '.join(WAYS)}: several by commas")
    parser.add_argument("--folder", type=Path, help="where the checkpoint goes, in a new folder removed afterwards")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.task == "write":
        print(json.dumps(write_checkpoint(options.folder, options.preset, options.device)))
        return
    if options.task:
        print(json.dumps(load_and_train(options.folder, options.task, options.device)))
        return
    ways = options.ways.split(",")
    for way in ways:
        try:
            check_choice("ways", way, WAYS)
        except ValueError as error:
            parser.error(str(error))
    size = sum(2 * shape.numel() for shape in tensors_of(options.preset)[1].values())
    with tempfile.TemporaryDirectory(dir=options.folder or choose_folder(size)) as name:
        checkpoint = in_a_fresh_process("write", Path(name), options)
        print(f"{checkpoint['bytes'] / 1e9:.2f} GB written in {checkpoint['seconds']:.1f} s", flush=True)
        rows = []
        for way in ways:
            rows.append(in_a_fresh_process(way, Path(name), options))
            print(line(rows[-1], checkpoint), flush=True)
    if options.out:
        result = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "command": without_folders(" ".join(["python", "benchmarks/load.py", *arguments])),
            "device": device_name(options.device),
            "versions": versions(),
            "preset": options.preset,
            "checkpoint": checkpoint,
            "rows": rows,
        }
        write_json(options.out, result)


if __name__ == "__main__":
    main(sys.argv[1:])
