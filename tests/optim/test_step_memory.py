"""What a step takes, by kind, and what is said where there is no more of it."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn

from octavo import FP8TrainingConfig, convert_to_fp8, measure_memory
from octavo.optim import build_optimizer, offload_states, out_of_memory, step_in_backward, step_memory
from octavo.optim.out_of_memory import explain, explained, savings
from octavo.optim.step_memory import GIB, DeviceMemory, StepMemory, in_words

WAYS = {
    name: name for name in ("batch", "activations", "checkpointing", "release", "adamw8bit", "adamw4bit", "offload")
}
NUMBERS = 64 * 1024 * 8


def deep():
    """Eight matrices of one size."""
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))


def stepped(name="adamw", how=None):
    model = deep()
    optimizer = build_optimizer(name, model.parameters(), 1e-3)
    if how is not None:
        how(optimizer)
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def gpu(monkeypatch):
    """A device of 8 MiB, of which a peak of 20 bytes for each weight of `deep` was in use."""
    actual = DeviceMemory(peak=20 * NUMBERS, free=2**20, total=8 * 2**20)
    for module in (step_memory, out_of_memory):
        monkeypatch.setattr(module, "device_memory", lambda _device: actual)
    return actual


def test_kinds_by_size():
    actual = measure_memory(*stepped())
    expected = StepMemory("cpu", weights=4 * NUMBERS, gradients=4 * NUMBERS, states=8 * NUMBERS, host=0, peak=None)
    assert actual == expected
    assert actual.rest is None and "activations and temporary not measured" in str(actual)


@pytest.mark.parametrize(("name", "each"), [("adamw8bit", 2 * (1 + 4 / 256)), ("adamw4bit", 2 * (0.5 + 4 / 128))])
def test_low_bit_states_are_counted_by_what_they_consist_of(name, each):
    pytest.importorskip("torchao")
    tables = 8 * 2 * 256 * 4  # levels
    assert measure_memory(*stepped(name)).states == pytest.approx(each * NUMBERS, abs=tables)


def test_the_rest_is_what_is_left_of_the_peak(gpu):
    model, optimizer = stepped()
    optimizer.zero_grad()  # gradients count all the same
    actual = measure_memory(model, optimizer)
    assert actual.peak == gpu.peak and actual.rest == 4 * NUMBERS
    assert StepMemory.from_dict(actual.to_dict()) == actual
    released = measure_memory(*stepped(how=step_in_backward))
    assert released.gradients == 4 * NUMBERS // 8 and released.rest == 4 * NUMBERS * 15 // 8


def test_states_elsewhere_are_host_memory():
    model, optimizer = stepped()
    model.to("meta")  # as a GPU would be: another device
    actual = measure_memory(model, optimizer)
    # With weights of the optimiser's own, which the model no longer has.
    assert (actual.device, actual.states, actual.host) == ("meta", 0, 12 * NUMBERS)
    assert "in host memory" in str(actual)


@pytest.mark.usefixtures("gpu")
def test_rich_prints_a_table():
    file = io.StringIO()
    Console(file=file, width=80).print(measure_memory(*stepped()))
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("Memory of a step on cpu")
    assert any("optimiser states" in line and "4.0 MiB" in line for line in lines)
    assert any("peak" in line and "10.0 MiB" in line for line in lines)


def test_sizes_in_words():
    assert [in_words(size) for size in (None, 0, 2**20, GIB, 91 * GIB)] == [
        "not measured",
        "0.0 MiB",
        "1.0 MiB",
        "1.0 GiB",
        "91.0 GiB",
    ]


@pytest.mark.usefixtures("gpu")
def test_savings():
    model, optimizer = stepped()
    actual = savings(model, optimizer, measure_memory(model, optimizer))
    assert actual["batch"] == 2 * NUMBERS
    assert actual["release"] == 4 * NUMBERS * 7 // 8
    assert actual["adamw8bit"] == pytest.approx(8 * NUMBERS - 2.03 * NUMBERS, rel=1e-3)
    assert actual["offload"] == 8 * NUMBERS * 5 // 8  # three of eight are on their way
    assert not {"activations", "checkpointing"} & set(actual)


@pytest.mark.usefixtures("gpu")
def test_states_that_are_yet_to_come_can_be_saved():
    model = deep()
    optimizer = build_optimizer("adamw", model.parameters(), 1e-3)
    now = step_memory.measure_now(model, optimizer)
    assert (now.gradients, now.states) == (0, 0)
    assert savings(model, optimizer, now)["adamw4bit"] == pytest.approx(8 * NUMBERS - 1.0625 * NUMBERS, rel=1e-3)


@pytest.mark.usefixtures("gpu")
def test_what_is_done_already_is_not_offered():
    pytest.importorskip("torchao")
    model, optimizer = stepped("adamw4bit", step_in_backward)
    assert "release" not in savings(model, optimizer, measure_memory(model, optimizer))
    text = explain(torch.OutOfMemoryError(), model, optimizer, WAYS)
    assert "adamw4bit" not in text and "adamw8bit" not in text and "release" not in text and "batch" in text
    model, optimizer = stepped(how=offload_states)
    model.to("meta")
    assert not {"offload", "adamw8bit"} & set(savings(model, optimizer, measure_memory(model, optimizer)))


def test_a_decoder_can_keep_less():
    transformers = pytest.importorskip("transformers")
    from decoder_cases import build

    for activations, offered in (("bf16", True), ("fp8", False)):
        model = build()
        convert_to_fp8(model, FP8TrainingConfig(activations=activations))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        actual = savings(model, optimizer, measure_memory(model, optimizer))
        assert ("activations" in actual) is offered and actual["checkpointing"] is None
    model.gradient_checkpointing_enable()
    assert "checkpointing" not in savings(model, optimizer, measure_memory(model, optimizer))
    assert isinstance(model, transformers.PreTrainedModel)


@pytest.mark.usefixtures("gpu")
def test_the_explanation():
    model, optimizer = stepped()
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 MiB. GPU 0 has a total capacity of …")
    lines = explain(error, model, optimizer, WAYS, "the last checkpoint is there").splitlines()
    assert lines[0] == "out of GPU memory: 3.0 MiB more were asked for, 1.0 MiB of 8.0 MiB were free"
    assert lines[1] == (
        "  what took it: weights 2.0 MiB, gradients 2.0 MiB, optimiser states 4.0 MiB, "
        "activations and temporary 2.0 MiB"
    )
    assert lines[2:] == [
        "  what would take less:",
        "    about 3.5 MiB less: adamw4bit",
        "    about 3.0 MiB less: adamw8bit",
        "    about 2.5 MiB less: offload",
        "    about 1.8 MiB less: release (alone not enough)",
        "    about 1.0 MiB less: batch (alone not enough)",
        "  the last checkpoint is there",
    ]


@pytest.mark.usefixtures("gpu")
def test_the_error_stays_what_it_was():
    """Accelerate tells by its type and its one argument that a smaller batch may help."""
    model, optimizer = stepped()
    message = "CUDA out of memory. Tried to allocate 2.00 GiB."
    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        explained(model, optimizer, lambda: {"batch": "half the batch"}, lambda: ""),
    ):
        raise torch.OutOfMemoryError(message)
    assert caught.value.args == (message,)
    assert "less: half the batch" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError) as other, explained(model, optimizer, dict, str):
        raise RuntimeError("something else")
    assert not hasattr(other.value, "__notes__")
