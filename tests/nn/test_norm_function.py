"""The autograd functions of norms and of q, k and v: gradients, what they save, and `torch.compile`."""

import pytest
import torch
from norm_cases import angles, new_norm
from torch.utils.checkpoint import checkpoint

from octavo.nn.norm import rms_norm
from octavo.nn.rotary import rotary
from octavo.numerics import norm as norm_spec
from octavo.numerics import rotary as rotary_spec
from octavo.numerics.rotary import Heads

HEADS = Heads(4, 2, 16)
WIDTH = HEADS.features


def exact(h, norm):
    factor = norm.weight + 1.0 if norm.shifted else norm.weight
    return factor * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + norm.eps)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("shape", [(6, WIDTH), (2, 3, WIDTH)])
def test_gradients(shape, shifted, adds):
    h, y = (torch.randn(shape, requires_grad=True) for _ in range(2))
    norm = new_norm(WIDTH, torch.float32, shifted=shifted)
    norm.weight.requires_grad_()
    leaves = [h, norm.weight, *([y] if adds else [])]
    total, x = rms_norm(h, norm, y if adds else None)
    wide = h + y if adds else h
    gradients = torch.randn(2, *shape)
    actual = torch.autograd.grad([total, x], leaves, list(gradients))
    expected = torch.autograd.grad([wide * 1.0, exact(wide, norm)], leaves, list(gradients))
    for mine, wanted in zip((total, x, *actual), (wide, exact(wide, norm), *expected), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_one_of_the_results_alone():
    h, y = (torch.randn(5, WIDTH, requires_grad=True) for _ in range(2))
    norm = new_norm(WIDTH, torch.float32, shifted=False)
    g = torch.randn(5, WIDTH)
    total, x = rms_norm(h, norm, y)
    assert all(torch.equal(d, g) for d in torch.autograd.grad(total, [h, y], g, retain_graph=True))
    alone = torch.autograd.grad(x, [h, y], g)
    assert torch.equal(*alone) and not torch.equal(alone[0], g)
    _, x = rms_norm(h.detach(), norm, y)
    assert torch.equal(torch.autograd.grad(x, y, g)[0], alone[1])


def test_nothing_is_saved_but_the_input():
    """A norm saves h, or the sum, which is there anyway; q, k and v save nothing, unless heads have norms."""
    saved = []
    h, y = (torch.randn(5, WIDTH, requires_grad=True) for _ in range(2))
    norm, (cos, sin) = new_norm(WIDTH, torch.float32, shifted=False), angles(5, 16, torch.float32)
    norms = tuple(new_norm(16, torch.float32, shifted=False) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        total, x = rms_norm(h, norm, y)
        large = [t for t in saved if t.numel() == h.numel()]
        assert len(large) == 1 and large[0].untyped_storage().data_ptr() == total.untyped_storage().data_ptr()
        saved.clear()
        rotary(x, cos, sin, HEADS)
        assert {t.untyped_storage().data_ptr() for t in saved} == {t.untyped_storage().data_ptr() for t in (cos, sin)}
        saved.clear()
        rotary(x, cos, sin, HEADS, norms)
        large = [t for t in saved if t.numel() == x.numel()]
        assert len(large) == 1 and large[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("positions", [1, 2])
def test_tokens_in_rows_and_in_one_row(flat, positions):
    """Two sequences of seven: with cos and sin for each, or one for both; or as one row of fourteen."""
    qkv = torch.randn(2, 7, WIDTH).to(torch.bfloat16).requires_grad_()
    cos, sin = (table.view(positions, 7, 16) for table in angles(7 * positions, 16, torch.bfloat16))
    if flat:
        given = qkv.flatten(0, 1), *(table.expand(2, 7, 16).flatten(0, 1) for table in (cos, sin))
    else:
        given = qkv, cos, sin
    actual = rotary(*given, HEADS)
    assert [x.shape for x in actual] == [(*given[0].shape[:-1], count, 16) for count in (4, 2, 2)]
    tables = [table.flatten(0, 1) for table in (cos, sin)]
    expected = rotary_spec.rotary(qkv.detach().flatten(0, 1), *tables, HEADS)
    gradients = [torch.randn_like(x) for x in actual]
    for mine, wanted in zip(actual, expected, strict=True):
        assert torch.equal(mine.reshape(wanted.shape), wanted)
    torch.autograd.backward(actual, gradients)
    flattened = [g.reshape(14, -1, 16) for g in gradients]
    wanted = rotary_spec.rotary_backward(*flattened, None, *tables, HEADS)[0]
    assert torch.equal(qkv.grad.flatten(0, 1), wanted)


def layer(h, y, norm, norms, cos, sin):
    h, x = rms_norm(h, norm, y)
    q, k, v = rotary(x, cos, sin, HEADS, norms)
    attended = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(1, 2) for part in (q, k, v)), is_causal=True, enable_gqa=True
    )
    h, x = rms_norm(torch.cat([h, h], -1)[..., : h.shape[-1]], norm)  # once more, without anything to add
    return h + x.tanh(), attended


@pytest.mark.parametrize("how", ["checkpoint", "aot_eager", "inductor"])
def test_compiled_and_checkpointed(how):
    torch._dynamo.reset()
    norm, (cos, sin) = new_norm(WIDTH, torch.bfloat16, shifted=False), angles(7, 16, torch.bfloat16)
    norms = tuple(new_norm(16, torch.bfloat16, shifted=False) for _ in range(2))
    leaves = [norm.weight, *(each.weight for each in norms)]
    for weight in leaves:
        weight.requires_grad_()
    h, y = (torch.randn(2, 7, WIDTH).to(torch.bfloat16).requires_grad_() for _ in range(2))
    given = h, y, norm, norms, cos[None], sin[None]
    expected = layer(*given)
    gradients = [torch.randn_like(x) for x in expected]
    wanted = torch.autograd.grad(expected, [h, y, *leaves], gradients)
    if how == "checkpoint":
        actual = checkpoint(layer, *given, use_reentrant=False)
    else:
        actual = torch.compile(layer, fullgraph=True, backend=how)(*given)
    mine = torch.autograd.grad(actual, [h, y, *leaves], gradients)
    for one, other in zip((*actual, *mine), (*expected, *wanted), strict=True):
        if how == "inductor":  # its own tanh and sums
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * other.abs().max().item())
        else:
            assert torch.equal(one, other)


def test_bits_of_the_specification():
    h, y = torch.randn(2, 5, 64).to(torch.bfloat16)
    norm = new_norm(64, torch.bfloat16, shifted=True)
    expected = norm_spec.add_rms_norm(h, y, norm)
    assert all(torch.equal(*pair) for pair in zip(rms_norm(h, norm, y), expected[:2], strict=True))
