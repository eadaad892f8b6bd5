"""Advice for a GPU: which option to take, the code that runs it, and what is impossible.

First what fits without computing anything twice, then with checkpointing, then with checkpoints in host memory; where
none of it fits, the same with states in host memory, or with master weights there, too. In each, first what keeps most:
all gradients, BF16 activations, the optimiser with the most exact states. `channel` comes before `block`, which is
slower (docs/memory.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.numerics.quantize import BLOCK
from octavo.tools.plan.fits import fits, largest_batch
from octavo.tools.plan.gpus import Gpu
from octavo.tools.plan.memory import plan_memory
from octavo.tools.plan.options import BY_EXACTNESS, CHECKPOINTING, CODES, OFFLOADS, Option
from octavo.tools.plan.request import checkpoint_name, with_batch
from octavo.tools.plan.timeline import GIB, Memory
from octavo.tools.shapes import DECODERS, Case

BASELINES = {"hf": "bf16-compiled", "own": "octavo-bf16"}  # as the bench calls them


@dataclass(frozen=True)
class Advice:
    """Advised option, or None if nothing fits. `batch`: the requested one, or the largest that fits."""

    option: Option | None
    batch: int
    why: str
    code: str = ""
    check: str = ""


def advise(model: str, case: Case, options: Sequence[Option], gpu: Gpu) -> Advice:
    asked = case.tokens // case.seq
    ranked = sorted((option for option in options if _can_be_advised(case, option, gpu)), key=_rank)
    option = next((option for option in ranked if fits(case, option, gpu)), None)
    why = ""
    if option is None:
        batches = [largest_batch(case, option, gpu) for option in ranked]
        best = max(batches)
        if not best:
            return Advice(None, 0, f"not even one sequence of {case.seq:,} tokens fits, in no way known here")
        option, case = ranked[batches.index(best)], with_batch(case, best)
        why = f"{asked} do not fit; "
    memory = plan_memory(case, option)
    why += f"{memory.peak_gib:.1f} of {gpu.room:.1f} GiB"
    if memory.host:
        why += f", and {memory.host_gib:.1f} GiB of host memory"
    code = case.family.code(model, case, option)
    check = case.family.bench_command(model, case, option, gpu)
    return Advice(option, case.tokens // case.seq, why, code, check)


def _can_be_advised(case: Case, option: Option, gpu: Gpu) -> bool:
    """Return True for Octavo's own code, in FP8 where the GPU has it, with the weights whose speed is measured."""
    family = case.family
    return option.code in family.advised[gpu.has_fp8] and option.weight_bytes == family.weight_bytes


def _rank(option: Option) -> tuple[int | bool, ...]:
    offload = 0 if option.offload is None else 1 + OFFLOADS.index(option.offload)
    checkpointing = CHECKPOINTING.index(option.checkpointing)
    states = BY_EXACTNESS.index(str(option.optimizer))
    where = offload > 0, checkpointing, offload, CODES.index(option.code)
    return *where, option.in_backward, option.activations == "fp8", states, option.recipe == "block"


def _loading(model: str, case: Case, arguments: Sequence[str]) -> list[str]:
    return [
        "model, tokenizer = FastLanguageModel.from_pretrained(",
        f"    {checkpoint_name(model)!r}, max_seq_length={case.seq},",
        *(f"    {argument}," for argument in arguments),
        ")",
    ]


def _compiling(option: Option, decoder: str) -> list[str]:
    return [f"for layer in {decoder}.layers:", "    layer.compile()"] if option.compiled else []


def decoder_code(model: str, case: Case, option: Option) -> str:
    """Return the code that trains a decoder as the option says."""
    return (_lora_code if case.frozen else _full_code)(model, case, option)


def _lora_code(model: str, case: Case, option: Option) -> str:
    imports = ["from octavo import FastLanguageModel"]
    loading, adapting = [], f"r={case.rank}, lora_alpha={case.rank}"
    if option.code == "fp8":
        loading = [f"load_in_fp8={option.recipe!r}"]
        if option.fp8_head:
            imports.append("from octavo.nn.frozen import activation_config")
            loading.append(f"fp8_config=activation_config({option.recipe!r}).replace(fp8_head=True)")
    else:
        adapting += ", autocast_adapter_dtype=False"
    if case.targets != "all":
        adapting += f", target_modules={case.target_modules}"
    kind = {"none": False, "layers": True, "offload": "unsloth"}[option.checkpointing]
    lines = [
        *imports,
        "",
        *_loading(model, case, loading),
        "model = FastLanguageModel.get_peft_model(",
        f"    model, {adapting},",
        f"    use_gradient_checkpointing={kind!r},",
        ")",
        *_compiling(option, "model.get_base_model().model"),
    ]
    return "\n".join(lines)


def _full_code(model: str, case: Case, option: Option) -> str:
    imports = ["from octavo import FastLanguageModel", "from octavo.optim import build_optimizer"]
    loading = ["full_finetuning=True"]
    if option.code == "fp8":
        loading.append("load_in_fp8=True")
        settings = ['activations="fp8"'] * (option.activations == "fp8") + ["fp8_head=True"] * option.fp8_head
        if settings:
            imports[0] = "from octavo import FastLanguageModel, FP8TrainingConfig"
            loading.append(f"fp8_config=FP8TrainingConfig({', '.join(settings)})")
    stepping = _stepping(option)
    if "step_in_backward" in stepping:
        imports[1] += ", step_in_backward"
    if "FP8Trainer" in stepping:
        imports[0] += ", FP8Trainer"
    lines = [
        *imports,
        "",
        *_loading(model, case, loading),
        *(["model.gradient_checkpointing_enable()"] if option.checkpointing == "layers" else []),
        *_compiling(option, "model.model"),
        f"optimizer = build_optimizer({option.optimizer!r}, model.parameters(), lr=1e-5)",
        *([stepping] if stepping else []),
    ]
    return "\n".join(lines)


def _stepping(option: Option) -> str:
    """Return the line that places the optimiser's steps and states."""
    if option.offload == "master":
        return 'trainer = FP8Trainer(model, optimizer, offload="master")'
    if option.in_backward:
        return f"step_in_backward(optimizer{', offload=True' if option.offload else ''})"
    return ""


def decoder_bench(model: str, case: Case, option: Option, gpu: Gpu) -> str:
    """The command that measures forward and backward of it. The bench neither checkpoints nor keeps less."""
    plain = Option("hf", optimizer=None, compiled=option.compiled)
    baselines = [name for code, name in BASELINES.items() if fits(case, replace(plain, code=code), gpu)]
    if option.checkpointing != "none" or not option.compiled or _saves_less(option) or not baselines:
        return ""
    config = model if Path(model).is_file() else f"{model}/config.json"
    words = ["octavo bench", f"--preset {model}" if model in DECODERS else f"--config {config}"]
    if case.layers != case.config["num_hidden_layers"]:
        words.append(f"--layers {case.layers}")
    if case.frozen:
        targets = "" if case.targets == "all" else f" --targets {case.targets}"
        words.append(f"--mode lora --rank {case.rank}{targets}")
    words.append(f"--tokens {case.tokens} --seq {case.seq}")
    if option.code == "fp8":
        extras = ("+fp8-head" if option.fp8_head else "") + ("" if option.fp8_products else "+weights-only")
        words.append(f"--recipe {option.recipe}{extras}")
    return " ".join([*words, f"--against {','.join(baselines)}"])


def _saves_less(option: Option) -> bool:
    return option.activations == "fp8" or option.offload is not None


def notes(case: Case, memories: Sequence[Memory], gpu: Gpu | None) -> list[str]:
    """Return remarks that the figures alone do not make, for this model on this GPU."""
    lines = []
    if gpu is not None:
        least = min(_persistent_bytes(memory) for memory in memories)
        if least > gpu.room * GIB:
            what = "weights, and adapters with their states," if case.frozen else "weights, gradients and states"
            lines.append(
                f"Not possible on {gpu.name}, whatever the batch: {what} alone take {least / GIB:.1f} GiB at the "
                f"least, and there are {gpu.room:.1f} GiB for tensors."
            )
        if not gpu.has_fp8:
            lines.append(f"{gpu.name} has no FP8 tensor cores: FP8 would be emulated there, slowly. Take BF16.")
    return lines + case.family.notes(case, gpu)


def decoder_background(case: Case, memories: Sequence[Memory]) -> list[str]:
    """Return how to read the table of all options."""
    remarks = []
    if case.frozen and all(memory.option.recipe != "block" for memory in memories):
        remarks.append(
            f"Left out: block. Of q, k, v, gate or up, one has outputs that are no multiple of {BLOCK}, so that they "
            "are computed one by one, and keep more."
        )
    if not case.frozen:
        remarks.append(
            "FP8 products alone halve what layers keep of most inputs; FP8 activations, gate and up as well. Weights "
            "stay in BF16, and so do gradients, which in backward are applied one by one: no clipping, no accumulation."
        )
    if any(memory.option.offload == "master" for memory in memories):
        remarks.append(
            "Master on the host: the GPU has the layers' weights in FP8, embedding and head in BF16; FP32 weights and "
            "states come from the host, one parameter at a time, in every step."
        )
    return remarks


def _persistent_bytes(memory: Memory) -> int:
    """Return the bytes that must exist at once even without tokens."""
    return max(moment.weights + moment.gradients + moment.states for moment in memory.moments)
