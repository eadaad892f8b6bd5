"""Full fine-tuning of BF16 weights in stock trainers: they train as FP32 weights do, and resume exactly."""

import pytest
import torch
from bounds import cosine
from trainer_cases import BYTES, build, byte_tokenizer, logs, trainer

from octavo import FastLanguageModel, OctavoCallback, convert_to_fp8
from octavo.optim.split_masters import LOW, has_master, master_at

transformers = pytest.importorskip("transformers")
LR = {"learning_rate": 1e-5, "max_steps": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    build(vocab_size=BYTES).bfloat16().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def as_before():
    yield
    from octavo import watch_environment

    watch_environment().disable()


def load(folder, **options):
    options = {"full_finetuning": True, "max_seq_length": 64, "tokenizer": False} | options
    return FastLanguageModel.from_pretrained(folder, **options)[0]


def values(run):
    """Each weight in the precision in which it is trained."""
    return [master_at(run.optimizer, p, torch.arange(p.numel())).float().clone() for p in run.model.parameters()]


def move(run):
    """What training adds to all weights."""
    before = [p.detach().flatten().to(torch.float32, copy=True) for p in run.model.parameters()]
    run.train()
    return torch.cat([after - start for after, start in zip(values(run), before, strict=True)])


def share(moves):
    return moves.count_nonzero().item() / moves.numel()


@pytest.mark.parametrize(
    "settings",
    [
        {"bf16": True},
        {"optim": "adamw_torch", "gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        {"optim": "adamw_torch_8bit"},
        {"optim": "adafactor"},
        {"lr_scheduler_type": "cosine", "weight_decay": 0.1},
    ],
    ids=lambda settings: next(iter(settings)) + str(next(iter(settings.values()))),
)
def test_an_unmodified_script_trains_as_with_fp32_weights(checkpoint, tmp_path, settings):
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its optimisers: a minute on a CPU
        exact = move(trainer(tmp_path, load(checkpoint, dtype=torch.float32), callbacks=[], **LR | settings))
        actual = move(trainer(tmp_path, load(checkpoint), callbacks=[], **LR | settings))
    assert cosine(actual, exact) > 0.99
    assert share(actual[exact != 0]) > 0.99  # rows of the embedding that no token reaches stay


def test_without_masters_most_of_it_is_lost_and_said(checkpoint, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(transformers.utils.logging.get_logger(), "propagate", True)
    shares = {}
    for master_weights in (True, False):
        run = trainer(tmp_path, load(checkpoint, load_in_fp8=True, master_weights=master_weights), **LR)
        moves = move(run)
        shares[master_weights] = share(moves)
        assert all(has_master(run.optimizer, p) == master_weights for p in run.model.parameters())
        logged = [entry["weights_moved"] for entry in logs(run)]
        assert min(logged) > 0.9 if master_weights else max(logged) < 0.5
        assert ("elements with a gradient moved in their first step" in caplog.text) != master_weights
    assert shares[True] > 0.9 and shares[False] < 0.5


def test_the_callback_keeps_masters_of_a_converted_model(tmp_path, capsys):
    actual = {}
    for given in ({}, {"master_weights": False}):
        model = build().bfloat16()
        convert_to_fp8(model)
        actual[bool(given)] = share(move(trainer(tmp_path, model, [OctavoCallback(**given)], **LR)))
    assert actual[False] > 0.9 and actual[True] < 0.5
    out = capsys.readouterr().out
    assert "82,240 weights are trained, 82,240 in BF16 with FP32 masters" in out
    assert "82,240 weights are trained, 82,240 in BF16 without" in out


@pytest.mark.parametrize(
    ("optim", "callback"),
    [("adamw_torch_fused", False), ("adamw_torch_fused", True), ("adafactor", False), ("adamw_torch_8bit", False)],
)
def test_a_run_resumes_exactly(checkpoint, tmp_path, optim, callback):
    settings = {"max_steps": 4, "learning_rate": 1e-5, "optim": optim, "save_strategy": "steps", "save_steps": 2}

    def fresh():
        model = load(checkpoint, load_in_fp8=callback)
        return trainer(tmp_path / "run", model, [OctavoCallback()] if callback else [], **settings)

    with torch.compiler.set_stance("force_eager"):
        whole = fresh()
        whole.train()
        resumed = fresh()
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert [e["loss"] for e in logs(resumed)][-2:] == [e["loss"] for e in logs(whole)][-2:]
    for run in (whole, resumed):
        assert all(LOW in run.optimizer.state[p] for p in run.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(values(whole), values(resumed), strict=True))


@pytest.mark.parametrize("options", [{"release_gradients": True}, {"offload": "master"}], ids=str)
def test_with_gradients_released(checkpoint, tmp_path, options):
    """Also of what offload="master" leaves on the device: norms, embedding and head."""
    settings = LR | {"max_grad_norm": 0.0}
    run = trainer(tmp_path, load(checkpoint, load_in_fp8="tensor"), [OctavoCallback(**options)], **settings)
    norm = run.model.model.norm.weight
    run.train()
    moved = master_at(run.optimizer, norm, torch.arange(64)) - 1
    assert (moved != 0).all() and moved.abs().max() < 1e-4 and (norm == 1).all()


def test_adapters_alone_have_no_masters(checkpoint, tmp_path):
    model = load(checkpoint, load_in_fp8=True, full_finetuning=False)
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False)
    run = trainer(tmp_path, model, callbacks=[], max_steps=1)
    run.train()
    assert not any(LOW in state for state in run.optimizer.state.values())
