"""`octavo plan` through the command: what it prints, writes, advises and refuses."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.support import MINIMUM_CAPABILITY
from octavo.tools.plan import persistent
from octavo.tools.plan.fits import MOST, STRIDE, fits, largest_batch, longest_sequence
from octavo.tools.plan.gpus import FP8_CAPABILITY, GPUS, Gpu, find_gpu
from octavo.tools.plan.memory import plan_memory
from octavo.tools.plan.options import Option, options_of
from octavo.tools.plan.request import Request, with_batch, with_sequence
from octavo.tools.plan.run import make_plan
from octavo.tools.plan.timeline import KINDS
from octavo.tools.shapes import DECODERS
from octavo.training.errors import UserError

Invoke = Callable[..., tuple[int, str, str]]
TINY = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


def write_config(folder: Path, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({name: value for name, value in (TINY | changes).items() if value is not None}))
    return path


def request(model="8b", mode="full", batch=4, seq=2048, **more):
    return Request(model, mode=mode, batch=batch, seq=seq, **more).case


@pytest.mark.parametrize("model", sorted(set(DECODERS) - {"tiny"}))
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_every_preset(invoke: Invoke, model: str, mode: str) -> None:
    for more in ([], ["--all"]):
        code, output, error = invoke("plan", model, "--mode", mode, "--gpu", "h200", *more)
        assert code == 0 and error == ""
        assert "BF16 Hugging Face, adamw" in output and "checkpoint" in output and "For h200: " in output
        assert max(len(line) for line in output.splitlines()) <= 80
        assert "…" not in output  # nothing is cut
        assert all(kind in output for kind in KINDS) == bool(more)


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_the_short_answer_comes_first_and_is_short(invoke: Invoke, mode: str) -> None:
    code, output, _ = invoke("plan", "8b", "--mode", mode, "--gpu", "h200")
    lines = output.splitlines()
    assert code == 0 and lines[0].startswith("8b, 8.03 billion parameters")
    assert any(line.startswith("For h200: FP8 ") for line in lines[1:3])
    assert len(lines) < 45 and "All " in lines[-1] and "--all" in lines[-1]
    _, everything, _ = invoke("plan", "8b", "--mode", mode, "--gpu", "h200", "--all")
    assert len(everything.splitlines()) > len(lines) + 20 and lines[1] in everything
    plan = make_plan(Request("8b", mode=mode, gpu="h200"))
    for text in (plan.advice.option.full_name, plan.memories[0].option.full_name):
        assert text in " ".join(output.split())


def test_nothing_is_answered_that_nobody_asked(invoke: Invoke) -> None:
    for model in ("70b", "8b"):
        for mode in ("full", "lora"):
            output = invoke("plan", model, "--mode", mode)[1]
            assert "Not possible" not in output and "64 GB" not in output and "For " not in output


def test_lengths_are_those_the_model_has_positions_for(invoke: Invoke, tmp_path: Path) -> None:
    """Neither the default nor what is offered goes beyond them."""
    for model, positions in (("135m", 8192), ("8b", 131072), ("qwen3-8b", 40960)):
        plan = make_plan(Request(model, mode="lora", gpu="1000"))
        assert max(plan.sequences) == positions and plan.case.seq == 2048
        with pytest.raises(UserError, match=rf"--seq {positions + 1}: .* has {positions} positions"):
            Request(model, seq=positions + 1)
    write_config(tmp_path / "mine")  # 64 positions
    code, output, error = invoke("plan", "mine", "--gpu", "24")
    assert code == 0, error
    assert "4 × 64 tokens" in output and "max_seq_length=64" in output
    assert set(make_plan(Request(str(tmp_path / "mine"), gpu="24")).sequences) == {64}


def test_a_narrow_terminal_cuts_no_figure() -> None:
    import io

    from rich.console import Console

    from octavo.tools.plan.show import show

    plan = make_plan(Request("70b", mode="lora", gpu="h200"))
    for width in (80, 100):
        file = io.StringIO()
        show(Console(file=file, width=width, force_terminal=True, color_system=None), plan, everything=True)
        text = file.getvalue()
        assert "…" not in text
        for memory, batch, sequence in zip(plan.memories, plan.batches, plan.sequences, strict=True):
            longest = f"{sequence:,}" if sequence else "–"
            ratio = memory.peak.total / plan.memories[0].peak.total
            assert re.search(rf" {memory.peak_gib:.1f} +{ratio:.2f} +{batch or '–'} +{longest} ", text)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("135m", 0.1345),
        ("360m", 0.3618),
        ("1b", 1.236),
        ("3b", 3.213),
        ("8b", 8.030),
        ("70b", 70.554),
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.191),
        ("qwen3-32b", 32.762),
    ],
)
def test_parameters_are_those_published(model: str, billions: float) -> None:
    assert persistent.parameters(request(model)) / 1e9 == pytest.approx(billions, abs=0.001)


def test_json_has_all_figures_and_adds_up(invoke: Invoke) -> None:
    code, output, _ = invoke("plan", "8b", "--mode", "lora", "--rank", "16", "--gpu", "24", "--json", "plan.json")
    assert code == 0 and "Figures: plan.json" in output
    assert [path.name for path in Path().iterdir()] == ["plan.json"]  # and no temporary file
    plan = json.loads(Path("plan.json").read_text())
    assert (plan["model"], plan["mode"], plan["batch"], plan["seq"], plan["rank"]) == ("8b", "lora", 4, 2048, 16)
    for option in plan["options"]:
        for moment in option["moments"]:
            assert moment["total"] == sum(moment[kind] for kind in KINDS)
            assert min(moment[kind] for kind in KINDS) >= 0
        assert option["peak"]["total"] == max(moment["total"] for moment in option["moments"])
        assert option["peak_gib"] == option["peak"]["total"] / 2**30
    assert plan["advice"]["option"]["recipe"] == "channel"


def test_it_needs_neither_transformers_nor_a_gpu(tmp_path: Path) -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('transformers', 'peft', 'torchao', 'triton', 'accelerate'):
            raise ImportError(name + ' was imported')
sys.meta_path.insert(0, Refuse())
sys.argv = ['octavo', 'plan', '70b', '--mode', 'lora', '--gpu', '80']
from octavo.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "70.55 billion parameters" in done.stdout


def test_a_config_of_ones_own(invoke: Invoke, tmp_path: Path) -> None:
    path = write_config(tmp_path / "mine")
    for model in (str(path), str(path.parent), "mine"):
        code, output, error = invoke("plan", model, "--seq", "64")
        assert code == 0, error
        assert output.startswith("mine, 0.00 billion parameters, 2 layers")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, ["hidden_size", "config.json"]),
        ({"hidden_size": "wide"}, ["hidden_size='wide'", "whole number"]),
        ({"num_attention_heads": 3}, ["hidden_size=128", "num_attention_heads=3", "head_dim"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3"]),
        ({"num_local_experts": 8}, ["num_local_experts=8", "dense"]),
        ({"model_type": "gpt2"}, ["model_type='gpt2'", "qwen3"]),
        ({"max_position_embeddings": 16}, ["--seq 64", "16 positions"]),
    ],
)
def test_a_bad_config_is_named(invoke: Invoke, tmp_path: Path, changes: dict, words: list[str]) -> None:
    write_config(tmp_path / "mine", **changes)
    code, output, error = invoke("plan", "mine", "--seq", "64")
    assert code == 2 and output == ""
    assert error.startswith("octavo: ") and error.count("\n") == 1, error
    for word in words:
        assert word in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["9b"], ["MODEL 9b", "8b", "config.json"]),
        (["."], ["MODEL .", "no config.json"]),
        (["broken.json"], ["MODEL broken.json", "not a JSON file"]),
        (["8b", "--mode", "half"], ["mode='half'", "full, lora"]),
        (["8b", "--batch", "0"], ["batch=0", "at least 1"]),
        (["8b", "--seq", "-5"], ["seq=-5"]),
        (["8b", "--layers", "0"], ["layers=0"]),
        (["8b", "--rank", "8"], ["--rank 8", "--mode lora"]),
        (["8b", "--mode", "lora", "--rank", "0"], ["rank=0"]),
        (["8b", "--mode", "lora", "--targets", "head"], ["targets='head'", "attention"]),
        (["8b", "--head", "fp4"], ["head='fp4'"]),
        (["8b", "--offload", "disk"], ["offload='disk'", "optimizer", "master"]),
        (["8b", "--mode", "lora", "--offload", "master"], ["--offload master", "adapters", "leave it out"]),
        (["8b", "--gpu", "h300"], ["--gpu h300", "h200"]),
        (["8b", "--gpu", "-1"], ["--gpu -1", "above 0"]),
        (["8b", "--gpu", "nan"], ["--gpu nan"]),
        (["8b", "--json", "no/such/plan.json"], ["--json no/such/plan.json", "folder"]),
        (["8b", "--json", "."], ["--json ."]),
    ],
)
def test_bad_input_is_one_clear_line(invoke: Invoke, arguments: list[str], words: list[str]) -> None:
    Path("broken.json").write_text("{")
    code, output, error = invoke("plan", *arguments)
    assert code == 2 and output == ""
    assert error.startswith("octavo: ") and error.count("\n") == 1, error
    for word in words:
        assert word in error, error


def test_a_full_disk_is_named(invoke: Invoke) -> None:
    Path("plan.json.tmp").mkdir()  # where the file is written first
    code, _, error = invoke("plan", "8b", "--json", "plan.json")
    assert code == 1 and "cannot write plan.json" in error and "--json" in error


def test_what_cannot_fit_is_said(invoke: Invoke) -> None:
    assert "Not possible" not in invoke("plan", "qwen3-32b", "--mode", "lora", "--gpu", "80")[1]
    text = " ".join(invoke("plan", "70b", "--gpu", "24")[1].split())
    assert "Not possible on 24 GiB, whatever the batch: weights, gradients and states alone take" in text
    assert "not even one sequence" in text
    text = " ".join(invoke("plan", "8b", "--gpu", "a100")[1].split())
    assert "a100 has no FP8 tensor cores" in text and "For a100: BF16 Octavo" in text


def test_blocks_that_straddle_linears_are_left_out(invoke: Invoke, tmp_path: Path) -> None:
    odd = {"num_attention_heads": 9, "num_key_value_heads": 3}
    write_config(tmp_path / "wide", hidden_size=1152, intermediate_size=6144, **odd, head_dim=128 + 64)
    _, output, _ = invoke("plan", "wide", "--mode", "lora", "--seq", "64", "--all")
    assert "Left out: block" in output and "FP8 block" not in output and "FP8 channel" in output
    # So small a model multiplies in BF16, and no block has to lie in one of several.
    write_config(tmp_path / "small", hidden_size=576, intermediate_size=1536, **odd, head_dim=64)
    _, output, _ = invoke("plan", "small", "--mode", "lora", "--seq", "64", "--all")
    assert "Left out: block" not in output and "FP8 weights block" in output and "FP8 weights channel" in output
    _, output, _ = invoke("plan", "135m", "--mode", "lora", "--gpu", "h200")
    assert "+weights-only" in output and "does not pay at a width of 419" in " ".join(output.split())


def test_more_tokens_and_more_layers_never_take_less() -> None:
    for mode in ("full", "lora"):
        case = request(mode=mode)
        for option in options_of(case, compiled=True, fp8_head=False) + options_of(case, compiled=False, fp8_head=True):
            peaks = [plan_memory(request(mode=mode, batch=batch), option).peak.total for batch in (1, 2, 3, 4, 16, 64)]
            assert peaks == sorted(peaks)
            peaks = [plan_memory(request(mode=mode, layers=layers), option).peak.total for layers in (1, 2, 8, 32)]
            assert peaks == sorted(peaks)


def test_checkpointing_keeps_the_inputs_of_layers() -> None:
    case = request(mode="lora")
    for code, recipe in (("own", None), ("fp8", "channel")):
        plain, layers, offload = (
            plan_memory(case, Option(code, recipe, checkpointing=kind)) for kind in ("none", "layers", "offload")
        )
        assert offload.peak.total < layers.peak.total < plain.peak.total
        head = next(moment for moment in layers.moments if moment.name == "head")
        norm = 2 * 8192 * 4096 * 2  # the last one's input and output
        assert head.activations == 32 * 8192 * 4096 * 2 + norm


def test_what_is_on_the_host_is_not_on_the_gpu() -> None:
    case = request("8b")
    for optimizer in ("adamw", "adamw8bit", "adamw4bit"):
        fp8_activations = Option("fp8", "delayed", optimizer, activations="fp8", in_backward=True)
        plain, states, master = (
            plan_memory(case, replace(fp8_activations, offload=how)) for how in (None, "optimizer", "master")
        )
        assert states.peak.total < plain.peak.total and states.peak.weights == plain.peak.weights
        all_states = persistent.states(case, fp8_activations)
        assert plain.host == 0 and all_states < states.host < 1.2 * all_states  # pinned: powers of two
        linears = case.layers * persistent.layer_parameters(case)
        assert master.host > states.host + 4 * linears
        assert plain.peak.weights - master.peak.weights == pytest.approx(linears, rel=1e-5)
        for memory in (states, master):
            assert max(moment.states for moment in memory.moments) < 0.2 * memory.host


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="in_backward=True"):
        Option("fp8", "delayed", offload="master")
    with pytest.raises(ValueError, match="in_backward=True"):
        Option("own", in_backward=True, offload="master")
    with pytest.raises(ValueError, match="nothing to offload"):
        Option("own", optimizer=None, offload="optimizer")


def test_one_kind_of_offload_beside_bf16(invoke: Invoke) -> None:
    for how, title in (("optimizer", "with states on the host"), ("master", "with master on the host")):
        code, output, error = invoke("plan", "8b", "--offload", how, "--gpu", "40", "--json", "plan.json", "--all")
        assert code == 0 and error == "" and title in output and "GiB of host memory" in output
        plan = json.loads(Path("plan.json").read_text())
        assert {option["option"]["offload"] for option in plan["options"]} == {None, how}
        assert all(bool(option["host_gib"]) == bool(option["option"]["offload"]) for option in plan["options"])
        assert (
            plan["advice"]["option"]["offload"] == how
            and f"offload={'True' if how == 'optimizer' else chr(34)}" in output
        )
    assert "on the host" not in invoke("plan", "8b", "--offload", "none", "--all")[1]


def test_offload_is_advised_where_nothing_else_fits() -> None:
    actual = {gpu: make_plan(Request("8b", gpu=gpu)).advice for gpu in ("h200", "48", "28", "20")}
    options = {gpu: advice.option for gpu, advice in actual.items() if advice is not None and advice.option is not None}
    assert [options[gpu].offload for gpu in ("h200", "48", "28", "20")] == [None, None, "optimizer", "master"]
    compile(actual["20"].code, "advice", "exec")
    assert "FP8TrainingConfig, FP8Trainer" in actual["20"].code and "host memory" in actual["20"].why


def test_bf16_weights_that_octavo_trains_have_masters() -> None:
    """A low half and FP32 means: 10 bytes a weight. In backward, the largest weight is joined, with its gradient."""
    case = request()
    ways = [way for way in options_of(case, compiled=True, fp8_head=False) if way.code == "fp8"]
    assert all(way.masters == (way.weight_bytes == 2) for way in ways)
    numbers = persistent.parameters(case)
    plain, eight = (next(w for w in ways if w.masters and w.optimizer == name) for name in ("adamw", "adamw8bit"))
    assert persistent.states(case, plain) == 10 * numbers
    assert persistent.states(case, eight) == persistent.states(case, replace(eight, masters=False)) + 2 * numbers
    released = replace(plain, in_backward=True)
    more = plan_memory(case, released).moments[1]
    assert more.name == "head's step" and more.buffers >= 8 * persistent.vocabulary_parameters(case)


def test_the_longest_sequence_fits_and_a_longer_one_does_not() -> None:
    case, gpu = request(mode="lora"), find_gpu("24")
    actual = {}
    for option in options_of(case, compiled=True, fp8_head=False):
        longest = longest_sequence(case, option, gpu)
        assert longest % STRIDE == 0 and (not longest or fits(with_sequence(case, longest), option, gpu))
        assert longest == 131072 or not fits(with_sequence(case, longest + STRIDE), option, gpu)
        actual[option.code, option.recipe, option.checkpointing] = longest
    for kind in ("none", "layers", "offload"):
        assert actual["fp8", "channel", kind] >= 2 * actual["own", None, kind] > 0
    limited = replace(case, config={**case.config, "max_position_embeddings": 1000})
    assert longest_sequence(limited, Option("own"), Gpu("all", 1e9, (9, 0))) == 1000


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_the_largest_batch_fits_and_one_more_does_not(mode: str) -> None:
    case = request(mode=mode)
    for option in options_of(case, compiled=True, fp8_head=False):
        gpu = GPUS["h100"]
        most = largest_batch(case, option, gpu)
        assert most == 0 or fits(with_batch(case, most), option, gpu)
        assert not fits(with_batch(case, most + 1), option, gpu)


def test_a_batch_beyond_counting_ends() -> None:
    assert largest_batch(request("tiny", seq=1), Option("own"), Gpu("all", 1e9, (9, 0))) == MOST


def test_gpus_by_name_and_size() -> None:
    assert find_gpu("H200") == find_gpu(" h200 ") == GPUS["h200"]
    assert find_gpu("24").gib == find_gpu("24GiB").gib == 24
    assert find_gpu("24").has_fp8 and not find_gpu("a100").has_fp8
    assert [name for name, gpu in GPUS.items() if not gpu.has_fp8] == ["a100", "a100-40gb", "rtx3090"]
    assert FP8_CAPABILITY == MINIMUM_CAPABILITY
    assert find_gpu("0.5").room == 0


def test_advice_prefers_what_computes_nothing_twice() -> None:
    wide = make_plan(Request("8b", gpu="b200")).advice
    assert wide is not None and wide.option is not None
    assert (wide.option.code, wide.option.optimizer, wide.option.checkpointing) == ("fp8", "adamw", "none")
    narrow = make_plan(Request("8b", gpu="60")).advice
    assert narrow is not None and narrow.option is not None
    assert (narrow.option.optimizer, narrow.option.checkpointing) == ("adamw4bit", "none")
    tight = make_plan(Request("8b", gpu="50")).advice
    assert tight is not None and tight.option is not None and tight.option.activations == "fp8" and not tight.check
    least = make_plan(Request("8b", batch=10_000, gpu="60")).advice
    assert least is not None and least.option is not None and 0 < least.batch < 10_000
    assert least.why.startswith("10000 do not fit")


@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize(
    ("mode", "more"), [("full", {}), ("lora", {"rank": 4}), ("lora", {"rank": 4, "targets": "attention"})]
)
@pytest.mark.parametrize("head", ["bf16", "fp8"])
def test_advised_code_runs(tmp_path: Path, gpu: str, mode: str, more: dict, head: str) -> None:
    """On a model of this shape, without a tokenizer."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).save_pretrained(tmp_path)
    plan = make_plan(Request(str(tmp_path), mode=mode, batch=1, seq=32, gpu=gpu, head=head, **more))
    assert plan.advice is not None
    code = plan.advice.code.replace("max_seq_length=32,", "max_seq_length=32, tokenizer=False,")
    names: dict = {}
    exec(code, names)
    model = names["model"]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.nbytes for parameter in trained) == persistent.gradients(plan.case, plan.advice.option)
    actual = sum(parameter.nbytes for parameter in model.parameters())
    assert actual == persistent.weights(plan.case, plan.advice.option)


@pytest.mark.parametrize("kind", ["layers", "offload"])
def test_advised_code_checkpoints(tmp_path: Path, kind: str) -> None:
    from octavo.tools.plan import advice

    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).save_pretrained(tmp_path)
    case = request(str(tmp_path), mode="lora", seq=32, rank=4)
    codes = [advice._lora_code(str(tmp_path), case, Option("fp8", "block", checkpointing=kind))]
    if kind == "layers":
        full = replace(case, frozen=False, rank=0)
        less = Option("fp8", "delayed", checkpointing=kind, activations="fp8", in_backward=True)
        codes.append(advice._full_code(str(tmp_path), full, less))
    for code in codes:
        names: dict = {}
        exec(code.replace("max_seq_length=32,", "max_seq_length=32, tokenizer=False,"), names)
        assert names["model"].is_gradient_checkpointing


def test_the_command_that_measures_exists(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    actual = make_plan(Request("8b", mode="lora", rank=8, targets="mlp", gpu="h200", head="fp8")).advice
    assert actual is not None
    assert actual.check == (
        "octavo bench --preset 8b --mode lora --rank 8 --targets mlp --tokens 8192 --seq 2048 "
        "--recipe channel+fp8-head --against bf16-compiled,octavo-bf16"
    )
    monkeypatch.setattr(sys, "argv", ["octavo", "bench", "--help"])
    with pytest.raises(SystemExit):
        main()
    text = capsys.readouterr().out
    assert all(option in text for option in re.findall(r"--[a-z-]+", actual.check))
