"""Products of frozen weights by direction: a forward in high precision, with or without FP8 in backward."""

import pytest
import torch
from rl_cases import adapted
from torch import nn

from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.linear_function import linear
from octavo.ops import linear as ops_linear
from octavo.ops.adapters import Adapter, Adapters
from octavo.rl.batches import Sample, pack
from octavo.rl.learner import Learner
from octavo.rl.products import PRODUCTS, set_products

M, K, N, R = 37, 96, 80, 4


def frozen(granularity):
    torch.manual_seed(0)
    return FP8FrozenLinear.from_linear(nn.Linear(K, N), granularity)


def run(module, products, *, dtype=torch.float32):
    """y, dx, dA and dB of one linear with an adapter."""
    generator = torch.Generator().manual_seed(1)
    assert set_products(module, products) == 1
    x, g, a, b = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((M, K), (M, N), (R, K), (N, R)))
    leaves = [each.requires_grad_() for each in (x, a, b)]
    adapters = Adapters((Adapter(0, N, 0.5),), (a,), (b,))
    y = linear(x, module.as_weight(), module.spec(x), module.states, bias=module.bias, adapters=adapters)
    return y.detach(), *torch.autograd.grad(y, leaves, g)


@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_forward_of_weights_only_backward_of_fp8(granularity):
    module = frozen(granularity)
    results = {products: run(module, products) for products in PRODUCTS}
    y, dx, da, db = results["fp8-dgrad"]
    exact_y, exact_dx, exact_da, exact_db = results["weights-only"]
    assert torch.equal(y, exact_y) and torch.equal(da, exact_da) and torch.equal(db, exact_db)
    assert torch.equal(dx, results["fp8"][1]) and not torch.equal(dx, exact_dx)
    assert torch.nn.functional.cosine_similarity(dx.flatten(), exact_dx.flatten(), dim=0) > 0.998


@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_rows_of_padding_change_nothing(granularity, monkeypatch):
    """On tensor cores tokens are padded to whole tiles, for the FP8 product of backward, too."""
    plain = run(frozen(granularity), "fp8-dgrad")
    monkeypatch.setattr(ops_linear, "_pads", lambda *_: True)
    for one, other in zip(run(frozen(granularity), "fp8-dgrad"), plain, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("recipe", ["block", "channel"])
def test_rows_of_padding_change_nothing_in_a_decoder(recipe, tmp_path, monkeypatch):
    """Whose MLP saves its input as it is, while all else that it saves has rows of padding."""
    model, _ = adapted(tmp_path, recipe=recipe, products=True)
    set_products(model, "fp8-dgrad")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    learner, (batch,) = (
        Learner(model.train()),
        pack([Sample([5, 6, 7], list(range(30, 64)), [0.0] * 34, 1.0)], 99, "cpu"),
    )

    def gradients():
        model.zero_grad()
        learner.logprobs(batch, 1.0).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    monkeypatch.setattr(ops_linear, "_pads", lambda *_: True)
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-5 * float(plain[name].abs().max()))


def test_unknown_products_are_refused():
    with pytest.raises(ValueError, match="products='bf16': choose one of fp8, weights-only, fp8-dgrad"):
        set_products(frozen("block"), "bf16")
