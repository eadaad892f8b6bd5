"""All figures of rollouts within minutes: few-token products, decode attention, an 8B in FP8 and BF16, and others.

    python benchmarks/rollouts.py --out rollouts                  # on a GPU: about four minutes
    python benchmarks/rollouts.py --only fp8,bf16 --out rollouts  # some of it
    python benchmarks/rollouts.py --preset tiny --device cpu --only fp8,bf16,generate --out rollouts   # does it run?

| section | |
| --- | --- |
| few | `few_tokens.py --quick`: products with tiles as they are |
| attention | decode attention at the sizes below, caches in BF16 and in FP8 |
| fp8 | FP8 weights and LoRA: 64 slots, the kernels of a step, then with FP8 keys and values, 1 and 256 slots,
|     | the latter also with FP8 products |
| bf16 | BF16 weights and LoRA, 64 slots, and the kernels of a step |
| generate, generate_batch | transformers' own in BF16, 64 slots, `--peer-tokens` new tokens each |

`octavo bench --mode rollout` is the measurement to publish: it runs more than once, and compares. This is the one to
work with. Each section runs in a process of its own, imports while others run, and writes `SECTION.json`; one that
fails leaves the others alone. After `--budget` seconds, sections that have not begun are named and left out.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.ops.decode import KVCache, decode_attention
from octavo.tools.bench.kernels import copy_bandwidth
from octavo.tools.bench.rollout.floor import DATASHEETS, Rates, floor_of_way, measure_rates
from octavo.tools.bench.rollout.ways import make_ways
from octavo.tools.bench.timing import device_time
from octavo.tools.rollouts import Size, kv_bytes
from octavo.tools.shapes import LLAMAS, Case, make_case

SECTIONS = ("few", "attention", "fp8", "bf16", "generate", "generate_batch")
FEW = 128  # slots that the few-token kernels take
LAYERS = 8  # whose caches an attention's graph goes through, so that none is in L2


def case_of(options: argparse.Namespace) -> Case:
    length = options.prompt + options.new_tokens
    return make_case(
        preset=options.preset, config=None, layers=options.layers, tokens=length, seq=length, seed=0,
        device=options.device, force=True, mode="lora", rank=options.rank,
    )  # fmt: skip


def size_of(options: argparse.Namespace, slots: int) -> Size:
    return Size(slots, options.prompt, options.new_tokens, min(options.group, slots))


def say(text: str) -> None:
    print(text, flush=True)


def line_of(name: str, size: Size, figures: dict[str, Any]) -> str:
    """Return the figures of a rollout in one line."""
    parts = [f"{name}, {size.slots} slots × {figures['new_tokens']}: {figures['tokens_per_s']:,.0f} tokens/s"]
    parts.append(f"{figures['floor_share']:.0%} of the floor ({figures['floor_tokens_per_s']:,.0f})")
    if "datasheet_tokens_per_s" in figures:
        share = figures["tokens_per_s"] / figures["datasheet_tokens_per_s"]
        parts.append(f"{share:.0%} of the data sheet's ({figures['datasheet_tokens_per_s']:,.0f})")
    if figures["step_s"] is not None:
        parts.append(f"step {figures['step_s'] * 1e3:.2f} ms, floor {figures['floor_step_s'] * 1e3:.2f}")
    parts.append(f"prefill {figures['prefill_s'] * 1e3:.0f} ms, warm-up {figures['warm_s']:.1f} s")
    for name, form in (("gap", ".4f"), ("trainer_gap", ".4f"), ("agreement", ".1%"), ("margin", ".3f")):
        if figures.get(name) is not None:
            parts.append(f"{name} {figures[name]:{form}}")
    if figures["peak_gib"] is not None:
        parts.append(
            f"peak {figures['peak_gib']:.2f} GiB ({figures['peak_reserved_gib']:.2f} reserved), before "
            f"{figures['before_gib']:.2f}, standby {figures['standby_gib']:.2f} "
            f"({figures['standby_reserved_gib']:.2f} reserved)"
        )
    return "; ".join(parts)


def few(options: argparse.Namespace) -> Any:
    """Run the benchmark of few-token products, which checks and times them."""
    script, out = Path(__file__).parent / "few_tokens.py", options.out / "few_tokens.json"
    subprocess.run([sys.executable, str(script), "--quick", "--out", str(out)], check=True)
    return json.loads(out.read_text())


def attention(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time decode attention of one layer, half way through completions."""
    case, device = case_of(options), options.device
    copy = copy_bandwidth(device)
    say(f"a copy: {copy:.3g} TB/s")
    heads = case.config["num_attention_heads"]
    rows = []
    for slots in options.slots:
        size = size_of(options, slots)
        for fp8 in (False, True):
            calls = _attention_calls(case, size, fp8, device)
            seconds = device_time(calls, device)
            tokens = size.prompts * size.prompt + slots * (size.new_tokens // 2)
            read = tokens * kv_bytes(case, fp8=fp8) / case.layers
            row = {"slots": slots, "fp8": fp8, "us": seconds * 1e6, "tb_per_s": read / seconds / 1e12}
            row["share"] = row["tb_per_s"] / copy
            rows.append(row)
            kind = "FP8" if fp8 else "BF16"
            say(f"attention, {slots} slots, {kind}, {heads} heads: {row['us']:.1f} µs, {row['tb_per_s']:.3g} TB/s, "
                f"{row['share']:.0%} of a copy")  # fmt: skip
    return rows


def _attention_calls(case: Case, size: Size, fp8: bool, device: str) -> list[Any]:
    heads, width = case.config["num_attention_heads"], case.head_dim
    groups = case.config.get("num_key_value_heads") or heads

    def cache(places: int, positions: int) -> KVCache:
        shape = (places, positions, groups, width)
        keys, values = (torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(2))
        if not fp8:
            return KVCache(keys, values)
        scales = [torch.full(shape[:3], 0.01, device=device) for _ in range(2)]
        keys, values = ((x / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8) for x in (keys, values))
        return KVCache(keys, values, *scales)

    def integers(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    group_of = integers([slot // size.group for slot in range(size.slots)])
    table = integers([list(range(i * size.group, (i + 1) * size.group)) for i in range(size.prompts)])
    prefix_lengths, lengths = integers([size.prompt] * size.prompts), integers([size.new_tokens // 2] * size.slots)
    q = torch.randn(size.slots, heads, width, device=device).to(torch.bfloat16)
    caches = [(cache(size.prompts, size.prompt), cache(size.slots, size.new_tokens)) for _ in range(LAYERS)]
    return [
        lambda prefix=prefix, suffix=suffix: decode_attention(
            q, prefix, prefix_lengths, group_of, suffix, lengths, width**-0.5, None, None, table
        )
        for prefix, suffix in caches
    ]


def fp8(options: argparse.Namespace) -> list[dict[str, Any]]:
    first, *others = options.slots
    plain, products = options.recipe, f"{options.recipe}+fp8-products"
    wanted = [(plain, first), (f"{plain}+fp8-kv", first)]
    for slots in others:
        # Beyond few tokens, activations as they are mean dequantised weights: FP8 products are the other choice.
        wanted += [(name, slots) for name in ((plain, products) if slots > FEW else (plain,))]
    return rollouts(options, wanted)


def bf16(options: argparse.Namespace) -> list[dict[str, Any]]:
    return rollouts(options, [("bf16", options.slots[0])])


def generate(options: argparse.Namespace) -> list[dict[str, Any]]:
    return rollouts(options, [("generate", options.slots[0])])


def generate_batch(options: argparse.Namespace) -> list[dict[str, Any]]:
    return rollouts(options, [("generate_batch", options.slots[0])])


def rollouts(options: argparse.Namespace, wanted: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Time rollouts of one model, and look into the first one's step."""
    from octavo.tools.bench.rollout.measure import measure
    from octavo.tools.bench.rollout.models import prepare

    case = case_of(options)
    name = wanted[0][0]
    others = ("generate", "generate_batch", "bf16")
    ways = {
        each: make_ways("rollout", [] if each in others else [each], [each] if each in others else [])[0]
        for each, _ in wanted
    }
    rates = measure_rates(case)
    started = time.perf_counter()
    model = prepare(case, ways[name]).model
    if options.device == "cuda":
        torch.cuda.synchronize()
    say(f"{name}: model in {time.perf_counter() - started:.1f} s; a copy {rates.tb_per_s:.3g} TB/s, products BF16 "
        f"{rates.bf16:.4g}, FP8 {rates.fp8 and round(rates.fp8)} TFLOP/s")  # fmt: skip
    rows = []
    for each, slots in wanted:
        way, size = ways[each], size_of(options, slots)
        turn = measure(model, case, way, size, runs=1, peer_tokens=options.peer_tokens, gap=slots == options.slots[0])
        used = Size(size.slots, size.prompt, turn["new_tokens"], size.group)
        figures = {"name": each, "slots": slots, **turn, **_floors(case, used, way, rates)}
        figures["floor_share"] = turn["tokens_per_s"] / figures["floor_tokens_per_s"]
        rows.append(figures)
        say(line_of(each, size, figures))
        if way.is_native and each == name and slots in options.profile:
            figures |= look_into(model, case, way, size)
    return rows


def _floors(case: Case, size: Size, way: Any, rates: Rates) -> dict[str, float]:
    floor = floor_of_way(case, size, rates, way)
    figures = {"floor_tokens_per_s": floor.tokens_per_s, "floor_step_s": floor.seconds}
    if case.device == "cuda" and torch.cuda.get_device_name() in DATASHEETS:
        sheet = DATASHEETS[torch.cuda.get_device_name()]
        figures["datasheet_tokens_per_s"] = floor_of_way(case, size, sheet, way).tokens_per_s
    return figures


def look_into(model: Any, case: Case, way: Any, size: Size) -> dict[str, Any]:
    """Print the kernels of a step, with all slots half way through their completions."""
    from octavo.tools.bench.rollout.generators import Native
    from octavo.tools.bench.rollout.measure import make_prompts
    from octavo.tools.bench.rollout.profile import LiveStep, kernel_lines

    generator = Native(model, way, size, case.seed)
    # The whole length, so that the cache has room for it; one step of it is enough.
    generator.complete(make_prompts(case, size), size.group, size.new_tokens)
    step = LiveStep(generator.engine, size.slots, max(size.new_tokens // 2, 1))
    seconds = step.seconds(min(20, max(size.new_tokens // 4, 1)))
    kernels = step.kernels()
    for line in kernel_lines(kernels, case.layers, seconds):
        say(f"  {line}")
    generator.standby()
    return {"live_step_s": seconds, "kernels": kernels}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tuple(LLAMAS), default="8b")
    parser.add_argument("--layers", type=int, help="instead of the preset's")
    parser.add_argument("--recipe", default="channel", help="of the FP8 weights: channel or block")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--slots", default="64,1,256", help="the first for everything, the others for FP8 alone")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--peer-tokens", type=int, default=64)
    parser.add_argument("--profile", default="64", help="numbers of slots whose step is looked into; 0 for none")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which no section begins")
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--one", choices=SECTIONS, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args(arguments)
    for name in ("slots", "profile"):
        setattr(options, name, [int(text) for text in getattr(options, name).split(",")])
    sections = options.only.split(",")
    for section in sections:
        if section not in SECTIONS:
            parser.error(f"--only: {section!r} is none of {', '.join(SECTIONS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --preset tiny shows whether it runs")
    if options.one:
        if options.one != "few":
            import octavo.tools.bench.rollout.measure
            import octavo.tools.bench.rollout.models  # noqa: F401
        sys.stdin.readline()  # until it is this section's turn
        rows = globals()[options.one](options)
        (options.out / f"{options.one}.json").write_text(json.dumps(rows, indent=2) + "\n")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    sys.exit(run_all(sections, given, options.budget))


def run_all(sections: Sequence[str], given: Sequence[str], budget: float) -> int:
    """Run the sections in their processes, one after the other; return 1 if one failed."""
    started = time.perf_counter()
    command = [sys.executable, __file__, *given, "--one"]
    children = [subprocess.Popen([*command, section], stdin=subprocess.PIPE, text=True) for section in sections]
    failed = 0
    try:
        for section, child in zip(sections, children, strict=True):
            now = time.perf_counter() - started
            if now > budget:
                say(f"== {section}: left out, {now:.0f} s have passed")
                continue
            say(f"== {section}, after {now:.0f} s")
            child.communicate("go\n")
            if child.returncode:
                say(f"== {section} FAILED: exit code {child.returncode}")
                failed = 1
    finally:
        for child in children:
            child.kill()
    say(f"== done after {time.perf_counter() - started:.0f} s")
    return failed


if __name__ == "__main__":
    main()
