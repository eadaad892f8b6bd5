"""FP8 models in stock trainers: transformers' Trainer and TRL's SFTTrainer, with what people switch on in them."""

import copy

import pytest
import torch
from trainer_cases import BYTES, build, converted, logs, losses, norms, sft_trainer, trainer

from octavo import FP8TrainingConfig, OctavoCallback

transformers = pytest.importorskip("transformers")
EAGER_COMPILE = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@pytest.fixture(scope="module")
def plain_trainer(tmp_path_factory):
    """The run that others are compared with."""
    trained = trainer(tmp_path_factory.mktemp("plain"))
    trained.train()
    return trained


@pytest.fixture(scope="module")
def plain(plain_trainer):
    return [entry["loss"] for entry in logs(plain_trainer)]


def test_it_trains_as_bf16_does(plain, plain_trainer, tmp_path):
    other = trainer(tmp_path, build(), callbacks=[])
    expected = losses(other)
    assert plain[-1] < plain[0]
    assert plain == pytest.approx(expected, rel=0.01) and plain != expected
    assert norms(plain_trainer) == pytest.approx(norms(other), rel=0.05)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"optim": "adamw_torch_fused"},
        EAGER_COMPILE,
    ],
    ids=["checkpointing", "reentrant checkpointing", "fused AdamW", "compile"],
)
def test_ways_to_the_same_numbers(plain, settings, tmp_path):
    torch._dynamo.reset()
    assert losses(trainer(tmp_path, **settings)) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"bf16": True},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        {"optim": "adamw_torch_8bit"},
        {"optim": "adamw_torch_4bit"},
        {"optim": "adafactor"},
        {"lr_scheduler_type": "linear", "warmup_steps": 2},
        {"label_smoothing_factor": 0.01},
    ],
    ids=["bf16", "accumulation", "torchao 8 bit", "torchao 4 bit", "adafactor", "warm-up", "label smoothing"],
)
def test_ways_to_nearly_the_same_numbers(plain, plain_trainer, settings, tmp_path):
    other = trainer(tmp_path, **settings)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its optimisers: a minute on a CPU
        actual = losses(other)
    assert actual == pytest.approx(plain, rel=0.01) and actual != plain
    assert norms(other) == pytest.approx(norms(plain_trainer), rel=0.05)


def test_histories_roll_once_per_optimiser_step(tmp_path):
    model = converted()
    trainer(tmp_path, model, gradient_accumulation_steps=2, per_device_train_batch_size=2).train()
    assert model.model.layers[0].mlp.down_proj.scaling.step_count == 4


def test_evaluation(plain, tmp_path):
    run = trainer(tmp_path, eval_strategy="steps", eval_steps=2, eval_on_start=True)
    assert losses(run) == plain  # it teaches nothing
    evaluations = [entry for entry in run.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 3 and not any("fp8" in key for entry in evaluations for key in entry)
    assert run.predict(run.eval_dataset).predictions.shape == (8, 24, 160)


@pytest.mark.parametrize("make", [trainer, sft_trainer])
def test_resume_continues_exactly(make, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "gradient_accumulation_steps": 2}
    whole = losses(make(tmp_path, **saving))
    for folder in (str(tmp_path / "checkpoint-2"), str(tmp_path / "checkpoint-4")):
        run = make(tmp_path / "elsewhere", **saving)
        run.train(resume_from_checkpoint=folder)
        assert [entry["loss"] for entry in logs(run)] == whole
    assert not list(tmp_path.rglob("*.tmp"))


def test_resume_without_scaling_state(tmp_path, monkeypatch):
    """Why it is kept: without it the losses differ. It is said, and training goes on."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = losses(trainer(tmp_path, **saving))
    warnings = []
    monkeypatch.setattr("octavo.hf.callback.logger.warning", warnings.append)
    (tmp_path / "checkpoint-2" / "octavo_scaling_0.pt").unlink()
    run = trainer(tmp_path, **saving)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    actual = [entry["loss"] for entry in logs(run)]
    assert actual == pytest.approx(whole, rel=0.01) and actual != whole
    assert len(warnings) == 1 and "octavo_scaling_0.pt" in warnings[0]


def test_resume_with_another_model_is_refused(tmp_path):
    trainer(tmp_path, save_strategy="steps", save_steps=2).train()
    other = trainer(tmp_path, converted(FP8TrainingConfig(fp8_head=True)))
    with pytest.raises(ValueError, match="24 tensors; this run resumes at step 2 with 26"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


SFT = {
    "plain": {},
    "FP32": {"bf16": False},
    "packed": {"packing": True},
    "packed, wrapped": {"packing": True, "packing_strategy": "wrapped"},
    "padding free": {"padding_free": True, "max_length": None},
    "checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("name", SFT)
def test_sft(name, tmp_path):
    """TRL's trainer, as it comes (so with bf16=True), with and without FP8."""
    expected = losses(sft_trainer(tmp_path, build(vocab_size=BYTES), callbacks=[], **SFT[name]))
    run = sft_trainer(tmp_path, **SFT[name])
    actual = losses(run)
    assert actual == pytest.approx(expected, rel=0.01) and actual != expected and actual[-1] < actual[0]
    assert "fp8/underflow_mean" in logs(run)[-1]


def test_sft_with_the_loss_of_trl(tmp_path):
    """Both losses are the same; TRL's has two figures more in the logs."""
    runs = [sft_trainer(tmp_path, callbacks=[OctavoCallback(own_loss=own)]) for own in (True, False)]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-3)
    assert ["mean_token_accuracy" in logs(run)[-1] for run in runs] == [False, True]
    assert runs[0].compute_loss.__self__ is runs[0]  # given back: the method itself
    assert runs[0].evaluate(runs[0].train_dataset)["eval_mean_token_accuracy"] > 0


def test_sft_without_padding_keeps_texts_apart(tmp_path):
    """Packed texts see themselves only, on the attention of the fused decoder, too: the losses are those of padding."""
    settings = {"bf16": False}
    models = [converted(precision="bf16", vocab_size=BYTES) for _ in range(2)]
    padded = losses(sft_trainer(tmp_path, models[0], **settings))
    assert losses(sft_trainer(tmp_path, models[1], **settings, **SFT["padding free"])) == pytest.approx(padded)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (trainer, {"label_smoothing_factor": 0.1}),
        (sft_trainer, {"label_smoothing_factor": 0.1}),
        (sft_trainer, {"callbacks": [OctavoCallback(own_loss=False)]}),
    ],
    ids=["smoothing", "smoothing in TRL", "TRL's loss"],
)
def test_an_fp8_head_that_is_not_used_is_an_error(make, settings, tmp_path):
    """They compute the loss from the head's weight, or from logits, and go around the FP8 product."""
    model = converted(FP8TrainingConfig(fp8_head=True), vocab_size=BYTES)
    with pytest.raises(RuntimeError, match="fp8_head=False"):
        make(tmp_path, model, **settings).train()


@pytest.mark.parametrize(("make", "sizes"), [(trainer, {}), (sft_trainer, {"vocab_size": BYTES})])
def test_an_fp8_head(make, sizes, tmp_path):
    run = make(tmp_path, converted(FP8TrainingConfig(fp8_head=True), **sizes))
    actual = losses(run)
    assert actual[-1] < actual[0]


def test_lora(tmp_path):
    """Adapters around converted linears: A has no gradient in the first step, and everything moves all the same."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(converted(), config)
    before = copy.deepcopy({n: p for n, p in model.named_parameters() if p.requires_grad})
    run = trainer(tmp_path, model, callbacks=[OctavoCallback()])
    actual = losses(run)
    assert actual[-1] != actual[0] and "fp8/scale_min" in logs(run)[-1]
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)
