"""FP8 in the stock Trainer, in TRL's SFTTrainer and under `accelerate launch`; and Accelerate's own back ends."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from decoder_cases import SIZES, build
from torch import nn

import octavo
from octavo import FP8Linear, FP8TrainingConfig
from octavo.nn.frozen import FP8FrozenLinear

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402

from octavo.hf import accelerate as ours  # noqa: E402
from octavo.hf import accelerate_backends as backends  # noqa: E402

VARIABLE = "ACCELERATE_MIXED_PRECISION"
EXAMPLES = Path(__file__).parents[2] / "examples" / "accelerate"


@pytest.fixture(autouse=True)
def as_found(monkeypatch):
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    before = Accelerator.__init__
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    for mode in list(ours._on.values()):
        mode.disable()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert Accelerator.__init__ is before


def mlp(*sizes):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def unmoved(model, before):
    return [n for n, p in model.named_parameters() if p.requires_grad and torch.equal(p, before[n])]


def linears_in_fp8(model):
    return sum(isinstance(module, FP8Linear) for module in model.modules())


def lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def examples(count=8):
    rows = torch.randint(1, SIZES["vocab_size"], (count, 12), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows]


def options(folder, **changes):
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    return {"output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 2, **quiet, **changes}


def trainer(kind, folder, model, **changes):
    if kind == "Trainer":
        arguments = transformers.TrainingArguments(**options(folder, **changes))
        return transformers.Trainer(model=model, args=arguments, train_dataset=examples(), eval_dataset=examples())
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(examples())
    arguments = trl.SFTConfig(**options(folder, dataset_kwargs={"skip_prepare_dataset": True}, **changes))
    return trl.SFTTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer()
    )


def tokenizer():
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(SIZES["vocab_size"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="w0", eos_token="w1")


# As people write it: the model first, then the variable, then the arguments.


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
@pytest.mark.parametrize("make", [build, lambda: lora(build())], ids=["full", "LoRA"])
def test_the_variable_after_loading(kind, make, tmp_path, monkeypatch, capsys):
    model = make()
    octavo.watch_environment()  # what loading a model through Octavo does
    monkeypatch.setenv(VARIABLE, "fp8")
    job = trainer(kind, tmp_path, model, fp16=False, bf16=False)
    before = weights(job.model)
    job.train()
    assert not unmoved(job.model, before)
    (report,) = job.accelerator.fp8_reports
    assert len(report.in_fp8) == 14 == linears_in_fp8(job.model)
    assert not any("lora" in entry.name for entry in report.in_fp8)
    assert report.scaling.step_count == 2 and all(row["amax"] for row in report.scaling.statistics().values())
    assert "Octavo FP8: layers of" in capsys.readouterr().out
    assert job.evaluate()["eval_loss"] < 20 and len(job.accelerator.fp8_reports) == 1


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_a_model_converted_before(kind, tmp_path, monkeypatch):
    model = build()
    octavo.convert_to_fp8(model, FP8TrainingConfig.from_recipe("current"))
    model = lora(model)
    octavo.watch_environment()
    monkeypatch.setenv(VARIABLE, "fp8")
    job = trainer(kind, tmp_path, model, fp16=False, bf16=False)
    before = weights(job.model)
    job.train()
    assert not unmoved(job.model, before) and linears_in_fp8(job.model) == 14
    assert "converted before: 14 of" in job.accelerator.fp8_reports[0].summary()


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_a_model_frozen_in_fp8(kind, tmp_path, monkeypatch):
    model = build()
    for name, linear in list(model.named_modules()):
        if name.endswith("_proj"):
            model.set_submodule(name, FP8FrozenLinear.from_linear(linear, name=name))
    model = lora(model)
    octavo.watch_environment()
    monkeypatch.setenv(VARIABLE, "fp8")
    job = trainer(kind, tmp_path, model, fp16=False, bf16=False)
    before = weights(job.model)
    job.train()
    assert not unmoved(job.model, before)
    (report,) = job.accelerator.fp8_reports
    assert "converted before: 14 of" in report.summary() and not any("lora" in e.name for e in report.in_fp8)
    job.accelerator.save_state(tmp_path / "state")
    job.accelerator.load_state(tmp_path / "state")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Trainer", {"bf16": True}, "pass bf16=False"),
        ("Trainer", {"fp16": True}, "pass fp16=False"),
        ("SFTTrainer", {}, "set bf16=True when it is not given"),  # TRL's own default
        ("SFTTrainer", {"bf16": True}, "pass bf16=False"),
        ("SFTTrainer", {"fp16": True}, "pass fp16=False"),
    ],
)
def test_arguments_that_override_the_variable(kind, changes, message, tmp_path, monkeypatch):
    octavo.watch_environment()
    monkeypatch.setenv(VARIABLE, "fp8")
    with pytest.raises(ValueError, match=message):
        trainer(kind, tmp_path, build(), **changes)


def test_the_variable_set_too_late(tmp_path, monkeypatch):
    octavo.watch_environment()
    arguments = transformers.TrainingArguments(**options(tmp_path))
    job = transformers.Trainer(model=build(), args=arguments, train_dataset=examples())
    monkeypatch.setenv(VARIABLE, "fp8")
    with pytest.raises(ValueError, match="built before ACCELERATE_MIXED_PRECISION was set"):
        job.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ValueError, match=r"'no' overrides ACCELERATE_MIXED_PRECISION=fp8: TrainingArguments reads"):
        transformers.Trainer(model=build(), args=arguments, train_dataset=examples())


def test_what_the_libraries_do_with_the_variable(tmp_path, monkeypatch):
    """The facts in `hf/accelerate.py`. Where one of these fails, a library has changed: read it again."""
    trl = pytest.importorskip("trl")
    monkeypatch.setenv(VARIABLE, "fp8")
    for kind, bf16, expected in [
        (transformers.TrainingArguments, None, "fp8"),
        (transformers.TrainingArguments, False, "fp8"),
        (transformers.TrainingArguments, True, "bf16"),
        (trl.SFTConfig, None, "bf16"),
        (trl.SFTConfig, False, "fp8"),
        (trl.SFTConfig, True, "bf16"),
    ]:
        arguments = kind(**options(tmp_path, bf16=bf16))
        assert arguments.mixed_precision == expected and os.environ[VARIABLE] == "fp8"


@pytest.mark.parametrize("bf16", [False, True])
def test_setup_needs_no_variable(bf16, tmp_path):
    octavo.setup_fp8_mixed_precision_training(config=FP8TrainingConfig.from_recipe("block"))
    job = trainer("Trainer", tmp_path, build(), bf16=bf16, gradient_accumulation_steps=2)
    before = weights(job.model)
    job.train()
    assert not unmoved(job.model, before)
    assert job.accelerator.mixed_precision == "bf16" and "block" in job.accelerator.fp8_reports[0].in_fp8[0].formats
    job.save_model(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(dict(loaded.state_dict()), dict(job.model.state_dict()), rtol=0, atol=0)


def test_evaluation_alone_is_in_fp8(tmp_path):
    octavo.setup_fp8_mixed_precision_training()
    job = trainer("Trainer", tmp_path, build())
    job.evaluate()
    assert linears_in_fp8(job.model) == 14


def test_trls_own_head_is_not_ours(tmp_path):
    octavo.setup_fp8_mixed_precision_training(config=FP8TrainingConfig(fp8_head=True))
    with pytest.raises(ValueError, match=r"fp8_head=True: the forward .* was replaced"):
        trainer("SFTTrainer", tmp_path, build()).train()
    AcceleratorState._reset_state(reset_partial_state=True)
    trainer("Trainer", tmp_path, build()).train()


# accelerate launch


def launch(*flags):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", EXAMPLES / "fp8.yaml", *flags]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*command], capture_output=True, text=True, env=variables)


def test_launch(tmp_path):
    result = launch(EXAMPLES / "loop.py", "--steps", "8", "--save", str(tmp_path))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Octavo FP8: layers of LlamaForCausalLM: 14 of 15 in FP8")
    assert float(lines[-1].split()[-1]) < float(lines[1].split()[-1]) - 0.3
    assert (tmp_path / "model.safetensors").exists()


def test_launch_with_another_precision_is_that_precision():
    result = launch("--mixed_precision", "bf16", EXAMPLES / "loop.py", "--steps", "1")
    assert result.returncode == 0, result.stderr
    assert "Octavo" not in result.stdout and "loss 5." in result.stdout


# Accelerate's own back ends.


def test_a_missing_package(monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda _: None)
    for backend, package in (("te", "transformer_engine"), ("ao", "torchao")):
        with pytest.raises(ImportError, match=f"^Octavo FP8: `{package}` is not installed.*pip install"):
            octavo.setup_fp8_mixed_precision_training(backend)
    assert not ours._on
    with pytest.raises(ValueError, match="backend='cuda': choose one of octavo, te, ao"):
        octavo.setup_fp8_mixed_precision_training("cuda")


def train_one_step(accelerator, model):
    before = weights(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.randn(32, 32)).square().mean())
    optimizer.step()
    return unmoved(model, before)


@pytest.mark.parametrize("config", [None, FP8TrainingConfig.from_recipe("current"), "channel"])
def test_torchao_trains_every_weight(config):
    pytest.importorskip("torchao")
    config = FP8TrainingConfig.from_recipe(config, skip=("2",)) if isinstance(config, str) else config
    octavo.setup_fp8_mixed_precision_training("ao", config)
    model = mlp(32, 32, 32, 32, 32)
    assert train_one_step(Accelerator(cpu=True), model) == []
    converted = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    expected = {"0", "1", "2", "3"} if config else {"1", "2"}
    assert converted == expected - {"2"} if config and config.granularity == "channel" else converted == expected


def test_torchao_in_the_trainer(tmp_path):
    pytest.importorskip("torchao")
    octavo.setup_fp8_mixed_precision_training("ao")
    job = trainer("Trainer", tmp_path, build(), bf16=True)
    before = weights(job.model)
    job.train()
    assert job.accelerator.mixed_precision == "fp8" and not unmoved(job.model, before)


def test_without_us_torchao_trains_nothing_it_converted():
    """The control: what the test above would find if nothing were corrected."""
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig

    stock = Float8LinearConfig(pad_inner_dim=True, enable_fsdp_float8_all_gather=True, emulate=True)
    handler = accelerate.utils.AORecipeKwargs(config=stock)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])
    assert train_one_step(accelerator, mlp(32, 32, 32, 32, 32)) == ["1.weight", "2.weight"]


@pytest.mark.parametrize(
    ("backend", "config", "message"),
    [
        ("ao", FP8TrainingConfig(), "scaling='delayed' with backend='ao'"),
        ("ao", FP8TrainingConfig.from_recipe("block"), "granularity='block' with backend='ao'"),
        ("ao", FP8TrainingConfig.from_recipe("current", margin=1), "margin=1 with backend='ao'"),
        ("te", FP8TrainingConfig.from_recipe("block"), "granularity='block' with backend='te'"),
        ("te", FP8TrainingConfig(amax_compute_algo="ema"), "amax_compute_algo='ema' with backend='te'"),
        ("te", FP8TrainingConfig(margin=0.5), r"margin=0\.5 with backend='te'"),
        ("te", FP8TrainingConfig(skip=("a",)), "skip=.* with backend='te'"),
    ],
)
def test_recipes_that_a_back_end_does_not_have(backend, config, message):
    translate = (
        backends.transformer_engine_fields if backend == "te" else lambda c: backends.torchao_config(c, fsdp2=False)
    )
    with pytest.raises(ValueError, match=message + ".*use backend='octavo'"):
        translate(config)


def test_transformer_engine_hears_of_every_field(monkeypatch):
    monkeypatch.setattr("accelerate.utils.dataclasses.is_transformer_engine_available", lambda: True)
    config = FP8TrainingConfig(amax_compute_algo="most_recent", amax_history_len=16, fp8_format="E4M3")
    told = backends.transformer_engine_handler(config).to_kwargs()
    assert told == {"amax_compute_algo": "most_recent", "amax_history_len": 16, "fp8_format": "E4M3"}
    mx = backends.transformer_engine_handler(FP8TrainingConfig.from_recipe("mx")).to_kwargs()
    assert mx == {"fp8_format": "E4M3", "use_mxfp8_block_scaling": True}
    monkeypatch.setenv("ACCELERATE_FP8_AMAX_HISTORY_LEN", "8")
    told = backends.transformer_engine_handler(None).to_kwargs()
    assert told == {"amax_compute_algo": "most_recent", "amax_history_len": 8}


def test_layers_that_transformer_engine_would_not_reach():
    backends.check_transformer_engine_reaches(mlp(32, 64, 30))  # nothing comes after the odd one
    backends.check_transformer_engine_reaches(build(vocab_size=161))
    with pytest.raises(ValueError, match=r"^1\.0 is 32 → 30, which 16 does not divide.*leave 1 in BF16; pad it"):
        backends.check_transformer_engine_reaches(nn.Sequential(nn.Linear(32, 32), mlp(32, 30, 32)))


def test_yaml_keys_that_nothing_reads(monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setenv("ACCELERATE_FP8_AMAX_HISTORY_LENGTH", "16")
    with pytest.raises(ValueError, match=r"nothing reads it.*`amax_history_len`, not `amax_history_length`"):
        octavo.setup_fp8_mixed_precision_training("ao")
