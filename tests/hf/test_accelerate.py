"""FP8 through Accelerate: in a loop by hand, and by the variable. FP8 asked for and not got is an error."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from decoder_cases import build
from torch import nn

import octavo
from octavo import FP8Linear, FP8TrainingConfig

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import AORecipeKwargs  # noqa: E402

from octavo.hf import accelerate as ours  # noqa: E402
from octavo.nn.frozen import FP8FrozenLinear, quantize_weight  # noqa: E402

METHODS = ("__init__", "prepare", "prepare_model", "backward")
VARIABLE = "ACCELERATE_MIXED_PRECISION"


@pytest.fixture(autouse=True)
def as_found(monkeypatch):
    """A process without Accelerate's state and variables; and afterwards nothing is wrapped any more."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    before = {name: Accelerator.__dict__[name] for name in METHODS}
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    for mode in list(ours._on.values()):
        mode.disable()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert {name: Accelerator.__dict__[name] for name in METHODS} == before


def mlp(size=32):
    return nn.Sequential(*(nn.Linear(size, size) for _ in range(4)))


def linears_in_fp8(model):
    return sum(isinstance(module, FP8Linear) for module in model.modules())


def step(accelerator, model, optimizer, size=32):
    loss = model(torch.randn(16, size)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def unmoved(model, before):
    return [n for n, p in model.named_parameters() if p.requires_grad and torch.equal(p, before[n])]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# A loop by hand.


def test_emulation_is_said(capsys):
    octavo.setup_fp8_mixed_precision_training()
    Accelerator(cpu=True).prepare(mlp())
    assert "emulated on cpu: no FP8 tensor cores; same numerics, slower" in capsys.readouterr().out


def test_ranks_that_accelerate_does_not_join_are_an_error(monkeypatch):
    """`accelerate launch` without `--cpu`, on a machine without GPUs, trains a copy of the model in each process."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    octavo.hf.accelerate._check_ranks(1)  # a variable of a cluster's own, and no launcher of ranks
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2, but this Accelerator is alone.* ACCELERATE_USE_CPU=1"):
        octavo.hf.accelerate._check_ranks(1)
    octavo.hf.accelerate._check_ranks(2)


def test_a_recipe_by_its_name():
    octavo.setup_fp8_mixed_precision_training(config="block")
    model = Accelerator(cpu=True).prepare(mlp())
    assert model[0].config == FP8TrainingConfig.from_recipe("block")
    with pytest.raises(ValueError, match="config='blocks'"):
        octavo.setup_fp8_mixed_precision_training(config="blocks")
    with pytest.raises(ValueError, match="config='blocks'"):
        octavo.watch_environment("blocks")


@pytest.mark.parametrize("second", ["no linear", "replaced forward", "emulate=False"])
def test_a_model_that_is_refused_leaves_all_as_they_were(second):
    config = {"replaced forward": {"fp8_head": True}, "emulate=False": {"emulate": False}}.get(second, {})
    octavo.setup_fp8_mixed_precision_training(config=FP8TrainingConfig(**config))
    first, other = build("Llama") if second == "replaced forward" else mlp(), build("Llama")
    before = [type(module) for module in first.modules()]
    attention = other.config._attn_implementation
    if second == "no linear":
        other = nn.Sequential(nn.ReLU())
    if second == "replaced forward":
        other.forward = lambda *_, **__: None
    accelerator = Accelerator(cpu=True)
    as_they_were = [type(module) for module in other.modules()], [set(vars(module)) for module in other.modules()]
    with pytest.raises((ValueError, RuntimeError)):
        accelerator.prepare(first, other)
    assert [type(module) for module in first.modules()] == before and not linears_in_fp8(other)
    actual = [type(module) for module in other.modules()], [set(vars(module)) for module in other.modules()]
    assert actual == as_they_were and not accelerator.fp8_reports
    if second != "no linear":
        assert other.config._attn_implementation == attention
    octavo.setup_fp8_mixed_precision_training().disable()
    octavo.convert_to_fp8(first)


def test_weights_alone_in_fp8_are_not_what_was_asked_for():
    octavo.setup_fp8_mixed_precision_training()
    frozen = FP8FrozenLinear(32, 32)
    frozen.set_weight(quantize_weight(torch.randn(32, 32), "block"))
    model = nn.Sequential(frozen, nn.Linear(32, 32))
    accelerator = Accelerator(cpu=True)
    assert accelerator.prepare_model(copy.deepcopy(model)) is not None
    frozen.fp8_products = False
    with pytest.raises(ValueError, match=r"loaded with fp8_products=False, and FP8 is on: .* turn FP8 off"):
        accelerator.prepare_model(model)


def test_weights_alone_in_fp8_and_an_accelerator_that_was_built_before():
    accelerator = Accelerator(cpu=True)
    octavo.setup_fp8_mixed_precision_training()
    frozen = FP8FrozenLinear(32, 32)
    frozen.set_weight(quantize_weight(torch.randn(32, 32), "block"))
    assert accelerator.prepare(nn.Sequential(frozen)) is not None
    frozen.fp8_products = False
    with pytest.raises(ValueError, match="would train without FP8"):
        accelerator.prepare(nn.Sequential(frozen))
    frozen.chosen_by_cost_model = True
    assert accelerator.prepare(nn.Sequential(frozen)) is not None and frozen.fp8_products


def test_what_was_planned_gives_way_to_what_is_asked_for():
    octavo.setup_fp8_mixed_precision_training()
    frozen = FP8FrozenLinear(32, 32)
    frozen.set_weight(quantize_weight(torch.randn(32, 32), "block"))
    frozen.fp8_products, frozen.chosen_by_cost_model = False, True
    assert Accelerator(cpu=True).prepare_model(nn.Sequential(frozen)) is not None and frozen.fp8_products


@pytest.mark.parametrize("order", ["optimiser before", "optimiser after", "one by one"])
def test_a_loop_by_hand(order, capsys):
    octavo.setup_fp8_mixed_precision_training()
    accelerator = Accelerator(cpu=True)
    model = mlp()
    parameters, before = list(model.parameters()), weights(model)
    if order == "optimiser before":
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
    elif order == "optimiser after":
        model = accelerator.prepare_model(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    else:
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
        model = accelerator.prepare(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert linears_in_fp8(model) == 4
    assert accelerator.mixed_precision == "bf16" and model[0](torch.randn(2, 32)).dtype == torch.float32
    step(accelerator, model, optimizer)
    assert not unmoved(model, before)
    (report,) = accelerator.fp8_reports
    assert len(report.in_fp8) == 4 and report.scaling.step_count == 1
    assert capsys.readouterr().out.count("Octavo FP8: layers of Sequential: 4 of 4 in FP8") == 1


def test_what_is_not_in_fp8_runs_in_bf16():
    octavo.setup_fp8_mixed_precision_training(config=FP8TrainingConfig(skip=("3",)))
    model = Accelerator(cpu=True).prepare(mlp())
    seen = []
    for i in (1, 3):
        model[i].register_forward_hook(lambda module, _, output: seen.append((type(module), output.dtype)))
    assert model(torch.randn(4, 32)).dtype == torch.float32  # Accelerate's own way with outputs
    assert seen == [(FP8Linear, torch.bfloat16), (nn.Linear, torch.bfloat16)]


def test_accumulation_clipping_and_a_scheduler():
    config = FP8TrainingConfig(amax_history_len=4)
    octavo.setup_fp8_mixed_precision_training("octavo", config)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert model[0].config == config
    moved = []
    for _ in range(4):
        before = weights(model)
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(16, 32)).square().mean() * 1e3)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                torch.testing.assert_close(norm, torch.tensor(0.5), rtol=1e-3, atol=0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        moved.append(not unmoved(model, before))
    assert moved == [False, True, False, True]
    assert accelerator.fp8_reports[0].scaling.step_count == 2  # histories roll with the optimiser, not with backward


def test_saved_state_brings_the_scales_back(tmp_path):
    octavo.setup_fp8_mixed_precision_training()
    accelerator = Accelerator(cpu=True)
    model = mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    scaling = accelerator.fp8_reports[0].scaling
    for _ in range(2):
        step(accelerator, model, optimizer)
    accelerator.save_state(tmp_path / "state")
    saved = copy.deepcopy(scaling.state_dict())
    step(accelerator, model, optimizer)
    expected = weights(model)

    accelerator.load_state(tmp_path / "state")
    assert unmoved(model, expected) == []
    again = scaling.state_dict()
    for name, value in saved.items():
        assert torch.equal(again[name], value) if isinstance(value, torch.Tensor) else again[name] == value
    step(accelerator, model, optimizer)  # the random numbers come back, too
    assert len(unmoved(model, expected)) == 8
    assert set(model.state_dict()) == set(mlp().state_dict())


def test_a_state_saved_without_fp8_loads(tmp_path):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    plain = accelerator.prepare(mlp())
    accelerator.save_state(tmp_path / "state")
    octavo.setup_fp8_mixed_precision_training()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(mlp())
    accelerator.load_state(tmp_path / "state")
    assert linears_in_fp8(model) == 4 and len(unmoved(model, weights(plain))) == 8


def test_a_second_accelerator_does_not_convert_again(capsys):
    octavo.setup_fp8_mixed_precision_training()
    model = Accelerator(cpu=True).prepare(mlp())
    scaling = model[0].scaling
    second = Accelerator(cpu=True)
    assert second.prepare(model) is model and second.prepare_model(model) is model
    assert model[0].scaling is scaling and linears_in_fp8(model) == 4
    assert capsys.readouterr().out.count("converted before: 4 of 4 in FP8") == 1


def test_a_converted_model_stays_as_it_was_converted():
    model = mlp()
    report = octavo.convert_to_fp8(model, FP8TrainingConfig.from_recipe("current", skip=("2",)))
    octavo.setup_fp8_mixed_precision_training()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    assert linears_in_fp8(model) == 3 and model[0].config.scaling == "current"
    (again,) = accelerator.fp8_reports
    assert again.scaling is report.scaling
    assert [(e.name, e.precision) for e in again] == [(e.name, e.precision) for e in report]


def test_a_model_converted_to_bf16_is_refused():
    model = build()
    octavo.convert_to_fp8(model, precision="bf16")
    octavo.setup_fp8_mixed_precision_training()
    with pytest.raises(ValueError, match=r"precision='bf16'.*octavo.restore"):
        Accelerator(cpu=True).prepare(model)


def test_a_model_without_linears_is_refused():
    octavo.setup_fp8_mixed_precision_training()
    with pytest.raises(ValueError, match=r"no nn\.Linear to convert"):
        Accelerator(cpu=True).prepare(nn.Sequential(nn.LayerNorm(4)))


# On, off, and in what order.


def test_nothing_stays_wrapped():
    before = {name: Accelerator.__dict__[name] for name in METHODS}
    mode = octavo.setup_fp8_mixed_precision_training()
    assert mode.enabled and Accelerator.__init__ is not before["__init__"]
    assert Accelerator(cpu=True).prepare(model := mlp()) is model and linears_in_fp8(model) == 4
    mode.disable()
    mode.disable()
    assert not mode.enabled and {name: Accelerator.__dict__[name] for name in METHODS} == before
    assert linears_in_fp8(Accelerator(cpu=True).prepare(mlp())) == 0


def test_an_accelerator_keeps_its_word_after_the_with_block():
    with octavo.setup_fp8_mixed_precision_training():
        accelerator = Accelerator(cpu=True)
    assert linears_in_fp8(accelerator.prepare(mlp())) == 4


def test_the_last_setup_counts_and_watching_outlives_it(monkeypatch):
    watching = octavo.watch_environment()
    first = octavo.setup_fp8_mixed_precision_training()
    second = octavo.setup_fp8_mixed_precision_training(config=FP8TrainingConfig.from_recipe("block"))
    assert watching.enabled and second.enabled and not first.enabled
    first.disable()
    assert Accelerator(cpu=True).prepare(mlp())[0].config.granularity == "block"
    second.disable()
    assert watching.enabled and octavo.watch_environment() is watching
    monkeypatch.setenv(VARIABLE, "fp8")
    assert Accelerator(cpu=True).prepare(mlp())[0].config.granularity == "tensor"


def test_somebody_elses_wrapper_is_left_alone(monkeypatch):
    mode = octavo.setup_fp8_mixed_precision_training()
    wrapped = Accelerator.prepare
    monkeypatch.setattr(Accelerator, "prepare", lambda self, *args: wrapped(self, *args))
    mode.disable()
    assert linears_in_fp8(Accelerator(cpu=True).prepare(mlp())) == 0
    monkeypatch.undo()
    octavo.setup_fp8_mixed_precision_training().disable()


def test_an_accelerator_built_before_is_refused(monkeypatch):
    early = Accelerator(cpu=True, mixed_precision="bf16")
    mode = octavo.setup_fp8_mixed_precision_training()
    with pytest.raises(ValueError, match=r"built before setup_fp8_mixed_precision_training\(\) was called"):
        early.prepare(mlp())
    with pytest.raises(ValueError, match="built before"):
        early.prepare_model(model=mlp())
    early.prepare(torch.optim.SGD(mlp().parameters()))  # no model, no matter
    mode.disable()
    octavo.watch_environment()
    early.prepare(mlp())
    monkeypatch.setenv(VARIABLE, "fp8")
    with pytest.raises(ValueError, match=f"built before {VARIABLE} was set to fp8"):
        early.prepare(mlp())


def test_precision_fixed_by_an_earlier_accelerator_is_refused():
    Accelerator(cpu=True)
    octavo.setup_fp8_mixed_precision_training()
    with pytest.raises(ValueError, match=r"mixed_precision='no' was fixed by an earlier Accelerator.*_reset_state"):
        Accelerator(cpu=True)


def test_a_model_prepared_without_fp8_is_refused():
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(mlp())
    octavo.setup_fp8_mixed_precision_training()
    with pytest.raises(ValueError, match="was prepared by an Accelerator without FP8"):
        Accelerator(cpu=True).prepare(model)


def test_backward_without_a_prepared_model_is_refused():
    octavo.setup_fp8_mixed_precision_training()
    model = mlp()
    with pytest.raises(RuntimeError, match=r"prepared no model.*accelerate launch"):
        Accelerator(cpu=True).backward(model(torch.randn(2, 32)).sum())


# The variable, and what contradicts it.


def test_without_the_variable_watching_changes_nothing():
    octavo.watch_environment()
    for given in (None, "no"):
        assert linears_in_fp8(Accelerator(cpu=True, mixed_precision=given).prepare(mlp())) == 0
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert type(accelerator) is Accelerator and linears_in_fp8(accelerator.prepare(mlp())) == 0


def test_fp8_as_an_argument_is_octavo_while_watching():
    octavo.watch_environment(FP8TrainingConfig.from_recipe("channel"))
    assert Accelerator(True, False, "fp8", cpu=True).prepare(mlp())[0].config.granularity == "channel"


@pytest.mark.parametrize(
    ("variable", "given", "turn_on", "message"),
    [
        ("fp8", "bf16", "watch", r"'bf16' overrides ACCELERATE_MIXED_PRECISION=fp8: pass bf16=False"),
        ("fp8", "bf16", "setup", r"'bf16' overrides ACCELERATE_MIXED_PRECISION=fp8: pass bf16=False"),
        ("fp8", "fp16", "watch", r"'fp16'.*pass fp16=False"),
        ("fp8", "no", "watch", r"'no' overrides.*set it before"),
        ("no", "fp16", "setup", r"'fp16'.*pass fp16=False"),
        ("fp16", None, "setup", r"'fp16'.*pass fp16=False"),
    ],
)
def test_precisions_that_contradict(monkeypatch, variable, given, turn_on, message):
    monkeypatch.setenv(VARIABLE, variable)
    octavo.watch_environment() if turn_on == "watch" else octavo.setup_fp8_mixed_precision_training()
    with pytest.raises(ValueError, match=message):
        Accelerator(cpu=True, mixed_precision=given)


def test_another_back_end_in_the_environment(monkeypatch):
    octavo.watch_environment()
    monkeypatch.setenv(VARIABLE, "fp8")
    accelerator = Accelerator(cpu=True)
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    for build_or_prepare in (lambda: Accelerator(cpu=True), lambda: accelerator.prepare(mlp())):
        with pytest.raises(ValueError, match=r"ACCELERATE_FP8_BACKEND='AO'.*unset it"):
            build_or_prepare()
    with pytest.raises(ValueError, match="ACCELERATE_FP8_BACKEND='AO'"):
        octavo.setup_fp8_mixed_precision_training()
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "octavo")
    with pytest.raises(ValueError, match="Accelerate knows AO, TE and MSAMP only"):
        Accelerator(cpu=True)


def test_another_back_ends_handler():
    pytest.importorskip("torchao")
    octavo.setup_fp8_mixed_precision_training()
    with pytest.raises(ValueError, match="kwargs_handlers has a AORecipeKwargs"):
        Accelerator(cpu=True, kwargs_handlers=[AORecipeKwargs()])


def test_a_recipe_in_the_launchers_yaml(monkeypatch):
    octavo.setup_fp8_mixed_precision_training(config=FP8TrainingConfig(amax_history_len=8))
    monkeypatch.setenv("ACCELERATE_FP8_AMAX_HISTORY_LEN", "1024")  # the launcher's default: nobody asked for it
    monkeypatch.setenv("ACCELERATE_FP8_FORMAT", "hybrid")
    Accelerator(cpu=True)
    monkeypatch.setenv("ACCELERATE_FP8_FORMAT", "E4M3")
    with pytest.raises(ValueError, match=r"ACCELERATE_FP8_FORMAT='E4M3'.*fp8_format='HYBRID'"):
        Accelerator(cpu=True)


def test_without_accelerate_the_fix_is_named():
    code = "import sys; sys.modules['accelerate'] = None; import octavo; octavo.watch_environment()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "octavo.watch_environment needs accelerate: pip install 'octavo[hf]'" in result.stderr


def test_importing_octavo_wraps_nothing_and_reads_nothing():
    code = (
        "import sys, octavo; assert not {'accelerate', 'transformers'} & set(sys.modules)\n"
        "import accelerate; before = accelerate.Accelerator.__init__; import octavo.hf.accelerate\n"
        "assert accelerate.Accelerator.__init__ is before; assert not hasattr(octavo, 'nonsense')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, VARIABLE: "fp8"})
