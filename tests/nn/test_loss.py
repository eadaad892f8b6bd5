"""Head and cross entropy in chunks against `F.cross_entropy`, in high precision and in FP8; and the cost model."""

import pytest
import torch
import torch.nn.functional as F
from bounds import cosine
from torch import nn

from octavo import FP8TrainingConfig
from octavo.kernels.tuning import HOPPER
from octavo.nn import cost_model
from octavo.nn import loss as module
from octavo.nn.loss import FP8Head, linear_cross_entropy
from octavo.numerics import cross_entropy as spec
from octavo.numerics.scaling import SCALE, SEEN, new_states

T, K, V = 300, 24, 50


def build(dtype=torch.float32, t=T):
    hidden = torch.randn(2, t // 2, K, dtype=dtype, requires_grad=True)
    weight = nn.Parameter(torch.randn(V, K, dtype=dtype))
    labels = torch.randint(0, V, (2, t // 2))
    labels[0, ::3] = -100
    return hidden, weight, labels


def exact(hidden, weight, labels, **kwargs):
    return F.cross_entropy((hidden @ weight.t()).float().flatten(0, -2), labels.flatten(), **kwargs)


def head_of(**options):
    recipe = FP8TrainingConfig(**options).recipe
    return FP8Head(recipe.x, recipe.w)


def head_states():
    return tuple(new_states(2, device="cpu").unbind())


@pytest.fixture(params=[2**30, 128 * V * 4, 1], ids=["one chunk", "three chunks", "smallest chunks"])
def chunk_bytes(request, monkeypatch):
    for name in ("CHUNK_BYTES", "FROZEN_CHUNK_BYTES"):
        monkeypatch.setattr(module, name, request.param)


@pytest.mark.usefixtures("chunk_bytes")
def test_loss_and_gradients_are_those_of_torch():
    hidden, weight, labels = build()
    loss = linear_cross_entropy(hidden, weight, labels)
    expected = exact(hidden, weight, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert loss.dtype == torch.float32 and loss.dim() == 0
    for upstream in (1.0, -2.5):
        actual, wanted = (
            torch.autograd.grad(function(hidden, weight, labels), (hidden, weight), torch.tensor(upstream))
            for function in (linear_cross_entropy, exact)
        )
        for one, other in zip(actual, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_chunks_hold_no_more_than_they_may(monkeypatch):
    seen = []
    cross_entropy = module.ops_loss.cross_entropy
    monkeypatch.setattr(module.ops_loss, "cross_entropy", lambda x, t: (seen.append(len(t)), cross_entropy(x, t))[1])
    monkeypatch.setattr(module, "CHUNK_BYTES", 128 * V * 4)
    linear_cross_entropy(*build())
    assert seen == [128, 128, 44]


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("count", [77, torch.tensor(77), torch.tensor(77.0)])
def test_another_count(count):
    """As Hugging Face does with gradient accumulation: the sum over the number of labels in all micro-batches."""
    hidden, weight, labels = build()
    loss = linear_cross_entropy(hidden, weight, labels, count=count)
    expected = exact(hidden, weight, labels, reduction="sum") / 77
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    actual, wanted = (torch.autograd.grad(y, (hidden, weight)) for y in (loss, expected))
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
@pytest.mark.parametrize("fp8", [False, True])
def test_frozen(frozen, fp8):
    hidden, weight, labels = build()
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    states = head_states()
    how = {"head": head_of(), "states": states} if fp8 else {}
    loss = linear_cross_entropy(hidden, weight, labels, **how)
    if frozen == "both":
        assert not loss.requires_grad
        assert not any(state.any() for state in states)  # nothing is learned in evaluation
        return
    loss.backward()
    assert (hidden.grad is not None, weight.grad is not None) == (frozen == "weight", frozen == "hidden")


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("fp8", [False, True])
def test_no_label_at_all(fp8):
    """As in torch the mean over nothing is NaN, and its gradient is zero."""
    hidden, weight, labels = build()
    labels[:] = -100
    expected = exact(hidden, weight, labels)
    assert expected.isnan()
    assert all((g == 0).all() for g in torch.autograd.grad(expected, (hidden, weight)))
    how = {"head": head_of(), "states": head_states()} if fp8 else {}
    loss = linear_cross_entropy(hidden, weight, labels, **how)
    assert loss.isnan()
    assert all((g == 0).all() for g in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("wrong", [-1, V, -99, 2**40])
def test_a_label_that_is_no_token_is_refused(fp8, wrong):
    """As torch does: a plausible loss would hide that a tokenizer and a model do not fit."""
    hidden, weight, labels = build()
    labels[-1, -1] = wrong
    with pytest.raises(IndexError, match="out of bounds"):
        exact(hidden, weight, labels)
    how = {"head": head_of(), "states": head_states()} if fp8 else {}
    for context in (torch.no_grad(), torch.enable_grad()):
        with context, pytest.raises(IndexError, match=f"labels: {wrong} .* vocabulary of {V}"):
            linear_cross_entropy(hidden, weight, labels, **how)


@pytest.mark.parametrize("shape", [(2, T // 2 - 1), (2, T // 2 + 1), (1,)])
def test_as_many_labels_as_tokens(shape):
    hidden, weight, _ = build()
    labels = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match="batch_size"):
        exact(hidden, weight, labels)
    with pytest.raises(ValueError, match=rf"labels: {labels.numel()} of them, for {T} tokens"):
        linear_cross_entropy(hidden, weight, labels)


def test_labels_are_integers():
    hidden, weight, labels = build()
    torch.testing.assert_close(
        linear_cross_entropy(hidden, weight, labels.int()), linear_cross_entropy(hidden, weight, labels)
    )
    with pytest.raises(TypeError, match=r"labels: torch.float32"):
        linear_cross_entropy(hidden, weight, labels.float())


def test_a_second_backward_is_refused():
    loss = linear_cross_entropy(*build())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast(dtype):
    hidden, weight, labels = build(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    doubles = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = exact(*doubles, labels)
    expected.backward()
    assert abs(loss.item() / expected.item() - 1) < 0.01
    for one, other in zip((hidden, weight), doubles, strict=True):
        assert cosine(one.grad, other.grad) > 0.999


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"scaling": "current"}], ids=["delayed", "current"])
def test_fp8_head(dtype, options):
    hidden, weight, labels = build(dtype)
    states = head_states()
    doubles = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = exact(*doubles, labels)
    wanted = torch.autograd.grad(expected, doubles, torch.tensor(3.0).double().to(expected.dtype))
    for _ in range(2):
        loss = linear_cross_entropy(hidden, weight, labels, head=head_of(**options), states=states)
        actual = torch.autograd.grad(loss, (hidden, weight), torch.tensor(3.0))
        assert abs(loss.item() / expected.item() - 1) < 0.02
        for one, other in zip(actual, wanted, strict=True):
            assert one.dtype == dtype and cosine(one, other) > 0.99
            assert abs(one.double().norm() / other.norm() - 1) < 0.03
    for state, x in zip(states, (hidden, weight), strict=True):
        assert state[SEEN] == 2 and state[SCALE] == x.float().abs().max() / 448


def test_the_gradient_of_logits_needs_no_history():
    """It lies in [−1, 1]: a constant scale, times the factor of the loss, which may be as small as one label in 10⁶."""
    logits, labels = 3 * torch.randn(20, V), torch.randint(0, V, (20,))
    _, lse = spec.cross_entropy(logits, labels)
    factor = torch.tensor(1e-6)
    rows, columns = spec.cross_entropy_quantize(logits, labels, lse, factor, module.E5M2)
    exact_gradient = spec.cross_entropy_backward(logits, labels, lse, factor)
    assert cosine(rows.dequantize(), exact_gradient) > 0.99
    assert torch.equal(columns.dequantize().mT, rows.dequantize())


@pytest.mark.parametrize("fp8", [False, True])
def test_compiled_in_one_graph(fp8):
    torch._dynamo.reset()
    hidden, weight, labels = build()
    how = [{"head": head_of(), "states": head_states()} if fp8 else {} for _ in range(2)]
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(compiled(hidden, weight, labels, **how[0]), (hidden, weight))
    expected = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, **how[1]), (hidden, weight))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_planner_likes_large_layers():
    for inputs, outputs in ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)):  # Llama 8B
        assert cost_model.why_not(8192, inputs, outputs, HOPPER) == ""
        assert cost_model.estimate(8192, inputs, outputs, HOPPER.rates).pays
    for tokens, inputs, outputs in ((8192, 64, 64), (64, 4096, 4096), (8192, 4096, 16), (128, 512, 512)):
        reason = cost_model.why_not(tokens, inputs, outputs, HOPPER)
        assert f"{tokens} tokens" in reason and "µs" in reason


def test_the_planner_is_monotone():
    """What pays keeps paying when any one size grows; and nothing gets cheaper by growing."""
    sizes = [2**n for n in range(6, 16)]
    for tokens in sizes:
        for inputs in sizes:
            actual = [cost_model.estimate(tokens, inputs, outputs, HOPPER.rates) for outputs in sizes]
            assert [e.pays for e in actual] == sorted(e.pays for e in actual)
            assert [e.fp8 for e in actual] == sorted(e.fp8 for e in actual)
            transposed = [cost_model.estimate(tokens, outputs, inputs, HOPPER.rates) for outputs in sizes]
            assert transposed == actual
        more = [cost_model.estimate(t, tokens, tokens, HOPPER.rates) for t in sizes]
        assert [e.pays for e in more] == sorted(e.pays for e in more)


@pytest.mark.parametrize("fp8", [False, True])
def test_without_gradients(fp8, monkeypatch):
    """Only the loss, and nothing learnt from it."""
    hidden, weight, labels = build()
    states = head_states()
    how = {"head": head_of(), "states": states} if fp8 else {}
    expected = linear_cross_entropy(hidden, weight, labels, **how)
    before = [state.clone() for state in states]
    for name in ("cross_entropy_backward_", "cross_entropy_quantize"):
        monkeypatch.setattr(module.ops_loss, name, lambda *_: pytest.fail("a gradient that nobody asked for"))
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, **how), expected.detach())
    assert all(torch.equal(state, old) for state, old in zip(states, before, strict=True))


def test_labels_with_steps_between_them(monkeypatch):
    """A kernel reads them one after the other."""
    hidden, weight, _ = build()
    labels = torch.randint(0, V, (T, 3))[:, 0]
    seen = []
    real = module.ops_loss.cross_entropy
    monkeypatch.setattr(module.ops_loss, "cross_entropy", lambda *a: (seen.append(a[1].stride()), real(*a))[1])
    actual = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(actual, exact(hidden, weight, labels), rtol=1e-5, atol=1e-5)
    assert set(seen) == {(1,)}
