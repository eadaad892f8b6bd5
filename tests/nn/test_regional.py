"""`convert_to_fp8(compile="layers")`: repeated layers are compiled once for all lengths, and restored."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from octavo import convert_to_fp8, restore
from octavo.nn import regional


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(32, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def counter(monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(regional, "BACKEND", counter)
    yield counter
    torch._dynamo.reset()


def train(model, length):
    x = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(length))
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_layers_compile_once_for_all_lengths(counter):
    torch.manual_seed(0)
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    report = convert_to_fp8(model, "channel", compile="layers")
    convert_to_fp8(plain, "channel")
    assert "layers compiled by torch.compile (4)" in report.summary()
    frames = []
    for length in (9, 17, 23, 40, 64, 31):
        for actual, expected in zip(train(model, length), train(plain, length), strict=True):
            torch.testing.assert_close(actual, expected)
        frames.append(counter.frame_count)
    assert 0 < frames[0] <= 2 and frames[2:] == [frames[2]] * 4
    assert frames[2] <= 2 * frames[0] + 1


def test_restore_gives_layers_back(counter):
    model = Model()
    convert_to_fp8(model, compile="layers")
    restore(model)
    train(model, 9)
    assert counter.frame_count == 0


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(32, 32)), nn.ModuleList([nn.Linear(32, 32)])])
def test_a_model_without_repeated_layers_is_refused_and_left_alone(model):
    with pytest.raises(ValueError, match=r"compile=.layers.: .* has no nn\.ModuleList of two or more layers"):
        convert_to_fp8(model, compile="layers")
    assert all(type(module) in (nn.Sequential, nn.ModuleList, nn.Linear) for module in model.modules())


def test_a_word_that_is_none():
    with pytest.raises(ValueError, match="compile"):
        convert_to_fp8(Model(), compile="all")
