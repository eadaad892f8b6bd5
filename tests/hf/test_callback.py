"""OctavoCallback: what it logs, says and refuses."""

import math
from functools import wraps

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from trainer_cases import build, converted, logs, losses, sft_trainer, trainer

import octavo
from octavo import FP8TrainingConfig, OctavoCallback
from octavo.hf.callback import scaling_managers
from octavo.hf.speed import Speed
from octavo.hf.update_check import MOST_STEPS, UpdateCheck

transformers = pytest.importorskip("transformers")
STATISTICS = {f"fp8/{name}" for name in (
    "underflow_mean", "underflow_max", "saturated_mean", "saturated_max", "rescaled_mean", "rescaled_max",
    "scale_min", "scale_max"
)}  # fmt: skip


class Reporter(transformers.TrainerCallback):
    """As TensorBoard's: registered before the user's callbacks."""

    def __init__(self):
        self.seen = []

    def on_log(self, *_, logs, **__):
        self.seen.append(dict(logs))


class Replaces(transformers.TrainerCallback):
    """As Accelerate's FP8 by torchao does it: new Parameters for converted layers, after the optimiser was built."""

    def on_train_begin(self, *_, model, **__):
        down = model.model.layers[1].mlp.down_proj
        down.weight = nn.Parameter(down.weight.detach().clone())


class Frozen(torch.optim.AdamW):
    def step(self, *_):
        pass


def test_it_is_a_public_name():
    assert octavo.OctavoCallback is OctavoCallback
    with pytest.raises(AttributeError, match="no attribute 'Oktavo'"):
        _ = octavo.Oktavo


def test_statistics_reach_history_and_reporters(tmp_path):
    reporters = Reporter(), Reporter()
    run = trainer(tmp_path, callbacks=[reporters[0], OctavoCallback(), reporters[1]], logging_steps=2)
    run.train()
    assert len(logs(run)) == 2
    for i, entry in enumerate(logs(run)):
        assert set(entry) >= STATISTICS and "tokens_per_second" not in entry
        assert 0 <= entry["fp8/underflow_mean"] <= entry["fp8/underflow_max"] < 0.1
        assert 0 <= entry["fp8/saturated_mean"] <= entry["fp8/saturated_max"] < 0.1
        assert 0 < entry["fp8/scale_min"] < entry["fp8/scale_max"] < 1
        for reporter in reporters:
            assert {**reporter.seen[i], "step": entry["step"]} == entry
    assert not STATISTICS & set(reporters[0].seen[-1])  # the summary at the end


def test_several_runs_of_one_trainer(tmp_path, capsys):
    run = trainer(tmp_path, max_steps=2)
    run.train()
    run.train()
    assert all(set(entry) >= STATISTICS for entry in logs(run))
    said = capsys.readouterr().out
    assert said.count("octavo: 14 of 15 linears in FP8 (E4M3·E4M3→E5M2 per tensor); 82,240") == 1
    assert said.count("octavo: FP8 is emulated on cpu: no FP8 tensor cores; same numerics, slower") == 1
    assert sum(isinstance(callback, OctavoCallback) for callback in run.callback_handler.callbacks) == 1


def test_tokens_per_second(tmp_path, capsys):
    run = trainer(tmp_path, include_num_input_tokens_seen=True, eval_strategy="steps", eval_steps=1)
    run.train()
    for entry in logs(run):
        assert 0 < entry["tokens_per_second"] < math.inf
    assert "include_num_input_tokens_seen" not in capsys.readouterr().out
    trainer(tmp_path, max_steps=1).train()
    assert 'include_num_input_tokens_seen="non_padding"' in capsys.readouterr().out


def test_speed_leaves_out_what_is_not_training(monkeypatch):
    times = iter([0.0, 4.0, 10.0, 14.0, 14.0])
    monkeypatch.setattr("octavo.hf.speed.time.perf_counter", lambda: next(times))
    speed = Speed(100)  # at 0
    speed.step_ended()  # at 4
    speed.other_work_ended()  # an evaluation until 10
    speed.step_ended()  # at 14
    assert speed.since_last_log(180) == 10.0  # 80 tokens in 8 s


@pytest.mark.parametrize("multiple", [None, 16])
def test_advice_about_lengths(multiple, tmp_path, capsys):
    sft_trainer(tmp_path, max_steps=9, pad_to_multiple_of=multiple).train()
    out = capsys.readouterr().out
    assert ("faster with pad_to_multiple_of=16" in out) == (multiple is None)


def test_a_model_that_is_not_converted_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"octavo.convert_to_fp8\(model\) before the Trainer"):
        trainer(tmp_path, build()).train()
    run = trainer(tmp_path, converted(precision="bf16"))  # the baseline has no statistics
    run.train()
    assert not STATISTICS & set(logs(run)[-1])


def test_other_recipes(tmp_path):
    for recipe in ("current", "block"):
        run = trainer(tmp_path, converted(FP8TrainingConfig.from_recipe(recipe)), max_steps=2)
        run.train()
        assert "fp8/underflow_max" in logs(run)[-1]


def test_it_looks_inside_of_wrappers(tmp_path):
    model = converted()
    (manager,) = scaling_managers(model)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert scaling_managers(nn.parallel.DistributedDataParallel(model)) == [manager]
    finally:
        torch.distributed.destroy_process_group()


def test_a_replaced_parameter_is_caught(tmp_path):
    run = trainer(tmp_path, callbacks=[Replaces(), OctavoCallback()])
    with pytest.raises(RuntimeError, match=r"1 of 21 weights .* did not move") as error:
        run.train()
    assert "model.layers.1.mlp.down_proj.weight (not in the optimiser)" in str(error.value)
    assert run.state.global_step == 0
    trainer(tmp_path, callbacks=[Replaces(), OctavoCallback(check_weights=False)]).train()


class ChecksOnly(transformers.TrainerCallback):
    def on_train_begin(self, *_, model, **__):
        self.check = UpdateCheck(model)

    def on_pre_optimizer_step(self, *_, optimizer, **__):
        self.check.before_step(optimizer)

    def on_optimizer_step(self, *_, optimizer, **__):
        self.check.after_step(optimizer)


@pytest.fixture
def accelerate_fp8(monkeypatch):
    """Accelerate's FP8 by torchao, as its launcher switches it on."""
    pytest.importorskip("torchao")
    from accelerate.state import AcceleratorState

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.usefixtures("accelerate_fp8")
def test_the_fp8_of_accelerate_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"mixed_precision='fp8'.*bf16=True"):
        trainer(tmp_path).train()


@pytest.mark.usefixtures("accelerate_fp8")
def test_the_fault_in_the_fp8_of_accelerate_is_seen(tmp_path):
    """The real one: of a stock model, the layers that Accelerate converts never learn."""
    with pytest.raises(RuntimeError, match="13 of 21 weights"):
        trainer(tmp_path, build(), callbacks=[ChecksOnly()]).train()


@pytest.mark.parametrize("settings", [{}, {"lr_scheduler_type": "linear", "warmup_steps": 2}], ids=["now", "warm-up"])
def test_a_frozen_optimiser_is_caught(settings, tmp_path):
    model = converted()
    optimizer = Frozen(model.parameters(), lr=1e-3)
    run = trainer(tmp_path, model, optimizers=(optimizer, None), **settings)
    with pytest.raises(RuntimeError, match=r"21 of 21 weights .* did not move"):
        run.train()
    assert run.state.global_step == (1 if settings else 0)  # nothing can move while the learning rate is zero


def test_a_group_that_leaves_weights_out_is_caught(tmp_path):
    model = converted()
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "norm" not in n], lr=0.1)
    with pytest.raises(RuntimeError, match="5 of 21 weights") as error:
        trainer(tmp_path, model, optimizers=(optimizer, None)).train()
    assert "model.norm.weight (not in the optimiser)" in str(error.value)


def checked(model, optimizer, loss, steps=1):
    check = UpdateCheck(model)
    for _ in range(steps):
        if check.done:
            break
        optimizer.zero_grad()
        loss().backward()
        check.before_step(optimizer)
        optimizer.step()
        check.after_step(optimizer)
    return check


def test_what_is_not_used_is_reported():
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "not": nn.Linear(8, 8)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, 8)
    check = checked(model, optimizer, lambda: model["used"](x).square().sum(), MOST_STEPS + 5)
    assert check.done and check.steps == MOST_STEPS
    (line,) = check.findings()
    assert line.startswith("2 trainable weights were not seen to learn: no gradient") and "not.weight, not.bias" in line


def test_what_has_a_zero_gradient_waits():
    """LoRA: B is zero, so A has no gradient in the first step."""
    model = nn.Sequential(nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False))
    nn.init.zeros_(model[1].weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    check = checked(model, optimizer, lambda: (model(x) - y).square().sum())
    assert not check.done and check.findings() == [
        "1 trainable weights were not seen to learn: its gradient was zero: 0.weight"
    ]
    assert checked(model, optimizer, lambda: (model(x) - y).square().sum(), 2).findings() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_far_below_adams_eps_are_no_fault(dtype):
    """One token over and over leaves attention no choice: the gradients of q and k are rounding alone."""
    model = nn.Linear(16, 16, bias=False).to(dtype)
    nn.init.constant_(model.weight, 0.1)
    with torch.no_grad():
        model.weight[0] = 0.0  # and has no gradient, as the padding row of an embedding
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)
    x = torch.full((4, 16), 1e-20, dtype=dtype)
    check = checked(model, optimizer, lambda: model(x)[:, 1:].sum())
    assert any("below the rounding" in line for line in check.findings())
    frozen = Frozen(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="did not move"):
        checked(model, frozen, lambda: model(x / 1e-20)[:, 1:].sum())


def test_one_step_says_nothing_of_loras_first_matrix():
    model = nn.ModuleDict({"lora_A": nn.ModuleDict({"default": nn.Linear(8, 2)}), "lora_B": nn.Linear(2, 8)})
    model = nn.ModuleDict({"q": model})
    nn.init.zeros_(model["q"]["lora_B"].weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, 8)
    check = checked(model, optimizer, lambda: model["q"]["lora_B"](model["q"]["lora_A"]["default"](x)).sum())
    assert not check.done and check.findings() == []


@pytest.mark.parametrize("sgd", [False, True])
def test_updates_below_the_rounding_are_no_fault(sgd):
    """1 + 1e-5 is 1 in BF16; weights near zero do move."""
    model = nn.RMSNorm(64).bfloat16()
    make = torch.optim.SGD if sgd else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-5, **({} if sgd else {"weight_decay": 0.0}))
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    check = checked(model, optimizer, lambda: model(x).square().mean(), MOST_STEPS)
    assert check.done
    line, share = check.findings()
    assert "its updates at lr=1e-05 are below the rounding of bfloat16: weight" in line
    assert share.startswith("0% of 66 elements with a gradient moved in their first step")


def test_small_gradients_of_sgd_move_less_than_those_of_adam():
    """By lr × gradient, which at this rate is below the rounding; Adam's would be the rate itself."""
    model = nn.RMSNorm(64).bfloat16()
    x = torch.randn(4, 64, dtype=torch.bfloat16)

    def loss():
        return 1e-4 * model(x).square().mean()

    line, _ = checked(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, MOST_STEPS).findings()
    assert "its updates at lr=0.1 are below the rounding of bfloat16: weight" in line
    with pytest.raises(RuntimeError, match="1 of 1 weights"):
        checked(model, Frozen(model.parameters(), lr=0.1), loss)


def test_updates_below_the_rounding_excuse_no_weight_that_the_optimiser_lacks():
    model = nn.Sequential(nn.RMSNorm(64), nn.RMSNorm(64)).bfloat16()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-5)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"1 of 2 weights .* 1\.weight \(not in the optimiser\)"):
        checked(model, optimizer, lambda: model(x).square().mean())


def test_an_embedding_of_which_few_rows_move():
    model = nn.Embedding(50_000, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    check = checked(model, optimizer, lambda: model(torch.tensor([31_337])).sum())
    assert check.done and not check.findings()


def test_a_skipped_step_proves_nothing():
    model = nn.Linear(8, 8)
    optimizer = Frozen(model.parameters(), lr=1e-3)
    optimizer.step_was_skipped = True  # as Accelerate says after an overflow
    x = torch.randn(4, 8)
    check = checked(model, optimizer, lambda: model(x).square().sum())
    assert not check.done
    optimizer.step_was_skipped = False
    with pytest.raises(RuntimeError, match="2 of 2 weights"):
        checked(model, optimizer, lambda: model(x).square().sum())


class Gradients(transformers.TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, *_, model, **__):
        self.seen.append(sum(parameter.grad is not None for parameter in model.parameters()))


def test_released_gradients_train_the_same(tmp_path, capsys):
    weights, watchers = [], (Gradients(), Gradients())
    for released, watcher in zip((False, True), watchers, strict=True):
        callbacks = [OctavoCallback(release_gradients=released), watcher]
        run = trainer(tmp_path / str(released), callbacks=callbacks, max_steps=3, max_grad_norm=0.0)
        run.train()
        weights.append([p.detach().clone() for p in run.model.parameters()])
    assert min(watchers[0].seen) > 20 and set(watchers[1].seen) == {0}
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other)
    assert "not seen to learn" not in capsys.readouterr().err


def test_released_gradients_of_weights_that_do_not_move(tmp_path):
    run = trainer(tmp_path, callbacks=[OctavoCallback(release_gradients=True)], max_steps=2, max_grad_norm=0.0)
    run.optimizer = Frozen(run.model.parameters(), lr=1e-3)
    with pytest.raises(RuntimeError, match="did not move in the optimiser's step"):
        run.train()


@pytest.mark.parametrize(("name", "value"), [("max_grad_norm", 1.0), ("gradient_accumulation_steps", 2)])
def test_what_needs_all_gradients_is_refused(tmp_path, name, value):
    options = {"max_grad_norm": 0.0} | {name: value}
    run = trainer(tmp_path, callbacks=[OctavoCallback(release_gradients=True)], **options)
    with pytest.raises(ValueError, match=rf"with {name}={value}: that needs all gradients at once; set"):
        run.train()


def test_released_gradients_in_several_runs_of_one_trainer(tmp_path, caplog):
    run = trainer(tmp_path, callbacks=[OctavoCallback(release_gradients=True)], max_steps=2, max_grad_norm=0.0)
    run.train()
    run.train()
    assert "not seen to learn" not in caplog.text
    assert not any(p._post_accumulate_grad_hooks for p in run.model.parameters())


def test_out_of_memory_is_explained(tmp_path, monkeypatch):
    run = trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=1)
    real, calls = run.model.forward, []

    @wraps(real)
    def forward(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(*args, **kwargs)

    monkeypatch.setattr(run.model, "forward", forward)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run.train()
    (note,) = caught.value.__notes__
    assert "2.0 GiB more were asked for" in note and "optimiser states" in note
    for words in (
        "per_device_train_batch_size=2",
        'optim="adamw_torch_4bit"',
        'activations="fp8"',
        "the last checkpoint is",
        "checkpoint-2: trainer.train(resume_from_checkpoint=True)",
    ):
        assert words in note
    calls.clear()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run.train()
    assert len(caught.value.__notes__) == 1  # once, in a second run as well
    calls.extend([1] * 3)
    run.train()
    assert not hasattr(run.training_step, "__wrapped__")


def test_masters_on_the_host_train_as_well_and_move(tmp_path, capsys):
    weights = []
    for options in ({"release_gradients": True}, {"offload": "master"}):
        model = converted(FP8TrainingConfig.from_recipe("current"))
        run = trainer(tmp_path, model, [OctavoCallback(**options)], max_steps=3, max_grad_norm=0.0)
        run.train()
        weights.append([p.detach().clone() for p in run.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    assert "not seen to learn" not in capsys.readouterr().err
    run = trainer(tmp_path, callbacks=[OctavoCallback(offload="master")], max_steps=2, max_grad_norm=0.0)
    run.optimizer = Frozen(run.model.parameters(), lr=1e-3)
    with pytest.raises(RuntimeError, match=r"down_proj.weight.*did not move|did not move.*proj.weight"):
        run.train()


@pytest.mark.parametrize("options", [{"release_gradients": True}, {"offload": "master"}], ids=str)
def test_after_a_run_that_broke_off(tmp_path, monkeypatch, options):
    """What it had set up is taken back before the next one begins: its hooks would apply gradients, too."""
    run = trainer(tmp_path, callbacks=[OctavoCallback(**options)], max_steps=3, max_grad_norm=0.0)
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(run, "compute_loss", lambda *_args, **_kwargs: 1 / 0)
        run.train()
    run.train()
    assert all(p.isfinite().all() for p in run.model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in run.model.parameters())


def test_a_run_with_masters_on_the_host_resumes_exactly(tmp_path):
    settings = {"max_steps": 4, "max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 2}

    def fresh(**more):
        model = converted().bfloat16()
        return trainer(tmp_path / "run", model, [OctavoCallback(offload="master")], **settings | more)

    whole = fresh()
    expected = losses(whole)
    resumed = fresh()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert [entry["loss"] for entry in logs(resumed)] == expected
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    saved = load_file(tmp_path / "run" / "checkpoint-4" / "model.safetensors")
    assert saved["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32


def test_what_else_could_be_offloaded(tmp_path):
    with pytest.raises(ValueError, match="offload='optimizer': 'master'"):
        OctavoCallback(offload="optimizer")
    run = trainer(tmp_path, callbacks=[OctavoCallback(offload="master")], max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"OctavoCallback\(offload='master'\) with max_grad_norm=1.0"):
        run.train()
