"""Rollouts of the native engine: tokens a second, milliseconds a step, the share of what reading alone would take.

    python benchmarks/decode_step.py                                  # an 8B, FP8 with LoRA and BF16, 64 × 512
    python benchmarks/decode_step.py --models fp8 --kv fp8 --slots 256
    python benchmarks/decode_step.py --models fp8 --new 64 --profile  # which kernels a step spends its time on

Weights are random, so completions end by length. The floor counts what a step has to read at `--bandwidth`: every
linear and the head once, adapters in BF16, each prompt once for its group, and half of the longest suffix of each slot.
Recorded steps are checked against steps as they are before anything is timed.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from octavo.decoders.fuse import fuse_loaded
from octavo.nn.frozen import FP8FrozenLinear
from octavo.rl import NativeEngine, Sampling
from octavo.tools.bench.random_model import build_causal_lm
from octavo.tools.shapes import DECODERS

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=sorted(DECODERS))
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--models", default="fp8,bf16", help="fp8, bf16, fp8-no-lora, bf16-no-lora")
    parser.add_argument("--granularity", default="channel", choices=["channel", "block"])
    parser.add_argument("--kv", default="auto", help="auto or fp8, or both with a comma")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes a second")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.models.split(","):
        model = build(name, arguments)
        for kv in arguments.kv.split(","):
            measure(name, kv, model, arguments)
        del model
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


def build(name: str, arguments: argparse.Namespace) -> Any:
    """Return a model with random weights: frozen, in FP8 or BF16, with adapters that are not zero, or without."""
    config = DECODERS[arguments.shape]
    layers = arguments.layers or config["num_hidden_layers"]
    positions = arguments.prompt + arguments.new + 1
    model: Any = build_causal_lm(config, layers=layers, positions=positions, device=arguments.device)
    model.requires_grad_(False)
    if name.startswith("fp8"):
        for path, module in list(model.named_modules()):
            if path.endswith(LINEARS):
                parent, _, child = path.rpartition(".")
                frozen = FP8FrozenLinear.from_linear(module, arguments.granularity, name=path)
                setattr(model.get_submodule(parent), child, frozen)
    fuse_loaded(model)
    if name.endswith("no-lora"):
        return model
    import peft

    from octavo.hf.lora import install

    install()
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=arguments.rank, target_modules=list(LINEARS), task_type="CAUSAL_LM")
    )
    for path, parameter in model.named_parameters():
        if "lora_B" in path:
            nn.init.normal_(parameter, std=0.01)
    return model


def measure(name: str, kv: str, model: Any, arguments: argparse.Namespace) -> None:
    prompts = torch.randint(1, model.config.vocab_size, (arguments.slots // arguments.group or 1, arguments.prompt))
    n = min(arguments.group, arguments.slots)
    engine = NativeEngine(model, slots=arguments.slots, kv_dtype=kv)
    check(engine, model, kv, prompts.tolist(), n)
    sampling = Sampling(max_new_tokens=arguments.new, stop_ids=(), seed=0)
    engine.generate(prompts.tolist(), n, sampling)
    least = floor(engine, arguments)
    for _ in range(arguments.repeat):
        engine.generate(prompts.tolist(), n, sampling)
        found = engine.statistics()
        step = found["seconds"] / found["steps"]
        print(
            f"{name}, KV {kv}: {found['tokens_per_second']:,.0f} tokens/s, {1e3 * step:.2f} ms a step, floor "
            f"{1e3 * least:.2f} ms ({least / step:.0%}); cache {found['cache_bytes'] / 2**30:.2f} GiB"
        )
    if arguments.device == "cuda":
        print(f"  peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        torch.cuda.reset_peak_memory_stats()
    if arguments.profile:
        with profiled():
            engine.generate(prompts.tolist(), n, Sampling(max_new_tokens=17, stop_ids=(), seed=0))
    engine.standby()


def check(engine: NativeEngine, model: Any, kv: str, prompts: list[list[int]], n: int) -> None:
    """Raise if recorded steps give other tokens than steps as they are."""
    if not engine.graphs:
        return
    sampling = Sampling(max_new_tokens=20, temperature=0, stop_ids=())
    plain = NativeEngine(model, slots=engine.slots, kv_dtype=kv, graphs=False)
    expected = [completion.tokens for completion in plain.generate(prompts, n, sampling)]
    plain.standby()
    found = [completion.tokens for completion in engine.generate(prompts, n, sampling)]
    if found != expected:
        raise ValueError("recorded steps give other tokens than steps as they are")


def floor(engine: NativeEngine, arguments: argparse.Namespace) -> float:
    """Seconds that a step takes if it does nothing but read, each thing once."""
    model = engine.policy.model
    read = sum(
        parameter.numel() * (2 if "lora" in path else parameter.element_size())
        for path, parameter in model.named_parameters()
        if "embed_tokens" not in path
    )
    groups = max(1, arguments.slots // arguments.group)
    tokens = groups * arguments.prompt + arguments.slots * arguments.new / 2
    return float((read + tokens * engine.policy.cache_format(engine.kv_dtype).bytes_per_token) / arguments.bandwidth)


@contextmanager
def profiled() -> Iterator[None]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        yield
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70))


if __name__ == "__main__":
    main()
