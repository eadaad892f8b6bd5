"""BDH against its equations, written a second time with plain loops; causality; sizes; generation; compilation."""

import math

import pytest
import torch
from torch import Tensor

from octavo.models import BDH, BDHConfig

SMALL = BDHConfig(dim=8, heads=2, neurons=6, layers=2, vocabulary=11)


def layer_norm(row: Tensor) -> Tensor:
    centred = row - row.mean()
    return centred / torch.sqrt((centred * centred).mean() + 1e-5)


def rotated(s: Tensor, position: int) -> Tensor:
    """RoPE on one neuron vector: pairs (2i, 2i+1) rotated by position · theta^(-2i/N)."""
    out = torch.empty_like(s)
    for i in range(0, len(s), 2):
        angle = position * (2.0**16) ** (-i / len(s))
        out[i] = s[i] * math.cos(angle) - s[i + 1] * math.sin(angle)
        out[i + 1] = s[i] * math.sin(angle) + s[i + 1] * math.cos(angle)
    return out


def reference(model: BDH, tokens: Tensor) -> Tensor:
    """The logits of one sequence, position by position and head by head."""
    config = model.config
    p = {name: value.detach().double() for name, value in model.named_parameters()}
    xs = [layer_norm(p["embedding"][token]) for token in tokens]
    for _ in range(config.layers):
        gated = [[] for _ in xs]
        for h in range(config.heads):
            ss = [torch.relu(x @ p["encoder"][h]) for x in xs]
            for now in range(len(xs)):
                a = torch.zeros(config.dim, dtype=torch.float64)
                for before in range(now):
                    a = a + (rotated(ss[now], now) @ rotated(ss[before], before)) * xs[before]
                t = torch.relu(layer_norm(a) @ p["encoder_v"][h])
                gated[now].append(ss[now] * t)
        xs = [layer_norm(x + layer_norm(torch.cat(heads) @ p["decoder"])) for x, heads in zip(xs, gated, strict=True)]
    return torch.stack([x @ p["lm_head"] for x in xs])


def make(config: BDHConfig, seed: int = 0, scale: float = 25.0) -> BDH:
    """A model with weights large enough that every term of the equations matters."""
    torch.manual_seed(seed)
    model = BDH(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= scale
    return model


@pytest.mark.parametrize("length", [1, 2, 7])
def test_logits_are_the_equations(length: int) -> None:
    model = make(SMALL).double()
    tokens = torch.randint(SMALL.vocabulary, (3, length))
    logits, loss = model(tokens)
    assert loss is None
    assert logits.shape == (3, length, SMALL.vocabulary)
    for row, sequence in zip(logits, tokens, strict=True):
        torch.testing.assert_close(row, reference(model, sequence), rtol=1e-5, atol=1e-5)  # angles are FP32


def test_the_reference_would_notice_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(SMALL).double()
    tokens = torch.randint(SMALL.vocabulary, (1, 7))
    monkeypatch.setattr("octavo.models.bdh.model.rope", lambda s, _cos, _sin: s)
    assert (model(tokens)[0][0] - reference(model, tokens[0])).abs().max() > 1e-2


def test_a_position_sees_nothing_after_itself() -> None:
    model = make(BDHConfig(dim=8, heads=2, neurons=64, layers=2))  # enough neurons that some fire everywhere
    tokens = torch.randint(256, (2, 9))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 256
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(dim=-1).all()


def test_loss_is_the_cross_entropy_in_fp32_and_reaches_every_parameter() -> None:
    model = make(SMALL).bfloat16()
    tokens = torch.randint(SMALL.vocabulary, (2, 5))
    logits, loss = model(tokens, tokens.roll(-1, 1))
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    picked = logits.float().log_softmax(-1).gather(-1, tokens.roll(-1, 1)[..., None])
    torch.testing.assert_close(loss, -picked.mean())
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_dropout_only_while_training() -> None:
    model = make(BDHConfig(dim=8, heads=2, neurons=64, layers=1, vocabulary=11, dropout=0.5))
    tokens = torch.randint(11, (1, 8))
    assert not torch.equal(model(tokens)[0], model(tokens)[0])
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])


@pytest.mark.parametrize(("size", "count"), [("tiny", 1_638_400), ("25m", 25_296_896), ("100m", 100_925_440)])
def test_sizes(size: str, count: int) -> None:
    config = BDHConfig.preset(size)
    with torch.device("meta"):
        model = BDH(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameter_count == count


def test_initial_weights_have_a_standard_deviation_of_0_02() -> None:
    torch.manual_seed(0)
    for parameter in BDH(BDHConfig.preset("tiny")).parameters():
        assert abs(parameter.std().item() - 0.02) < 0.0005
        assert abs(parameter.mean().item()) < 0.0005


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"neurons": 5}, "neurons=5"),
        ({"dim": 0}, "dim=0"),
        ({"layers": 1.5}, "layers=1.5"),
        ({"dropout": 1}, "dropout=1"),
    ],
)
def test_bad_shapes_are_named(options: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BDHConfig(**options)
    with pytest.raises(ValueError, match="tiny, 25m, 100m"):
        BDHConfig.preset("7b")


def test_generation() -> None:
    model = make(SMALL)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])

    def generate(seed: int, **options: float) -> Tensor:
        return model.generate(prompt, 6, generator=torch.Generator().manual_seed(seed), **options)

    assert generate(0).shape == (2, 9) and torch.equal(generate(0)[:, :3], prompt)
    assert torch.equal(generate(0), generate(0)) and not torch.equal(generate(0), generate(1))
    greedy = generate(0, temperature=0)
    assert torch.equal(greedy, generate(1, top_k=1))
    assert greedy[0, 3] == model(prompt)[0][0, -1].argmax()
    assert model.training


def test_generation_looks_back_no_further_than_its_context() -> None:
    model = make(SMALL)
    one, other = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[9, 2, 3, 4]])
    assert torch.equal(
        model.generate(one, 5, temperature=0, context=3)[:, 4:],
        model.generate(other, 5, temperature=0, context=3)[:, 4:],
    )


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": 0}, {"top_k": 12}, {"context": 0}])
def test_bad_generation_options_are_named(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make(SMALL).generate(torch.tensor([[1]]), 1, **options)
    with pytest.raises(ValueError, match="shape"):
        make(SMALL).generate(torch.zeros(1, 0, dtype=torch.long), 1)


def test_the_whole_model_is_one_graph() -> None:
    model = make(SMALL)
    tokens = torch.randint(SMALL.vocabulary, (2, 5))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, tokens)[1], model(tokens, tokens)[1])
