"""What the autocast leaves to torch: arguments that torch refuses, short contractions, regions and weights named so."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from octavo import FP8TrainingConfig, fp8_autocast

X, W, BATCH = (17, 32), (32, 18), (3, 17, 32)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


REFUSED = {
    "mm of 3-D": lambda: torch.mm(zeros(*BATCH), zeros(*W)),
    "mm by 3-D": lambda: zeros(*X).mm(zeros(1, *W)),
    "mm by a vector": lambda: torch.mm(zeros(*X), zeros(32)),
    "bmm of 2-D": lambda: torch.bmm(zeros(*X), zeros(*W)),
    "bmm by 2-D": lambda: torch.bmm(zeros(*BATCH), zeros(*W)),
    "bmm of other batches": lambda: zeros(*BATCH).bmm(zeros(2, *W)),
    "bmm that would broadcast": lambda: torch.bmm(zeros(*BATCH), zeros(1, *W)),
    "matmul": lambda: zeros(*X) @ zeros(*X),
    "matmul of other batches": lambda: zeros(*BATCH) @ zeros(2, *W),
    "matmul of other dtypes": lambda: zeros(*X) @ zeros(*W, dtype=torch.bfloat16),
    "addmm of 3-D": lambda: torch.addmm(zeros(18), zeros(*BATCH), zeros(*W)),
    "addmm to 3-D": lambda: torch.addmm(zeros(3, 17, 18), zeros(*X), zeros(*W)),
    "addmm to another shape": lambda: zeros(17).addmm(zeros(*X), zeros(*W)),
    "addmm to another dtype": lambda: torch.addmm(zeros(18, dtype=torch.bfloat16), zeros(*X), zeros(*W)),
    "addmm by a string": lambda: torch.addmm(zeros(18), zeros(*X), zeros(*W), alpha="1"),
    "baddbmm of other batches": lambda: torch.baddbmm(zeros(18), zeros(*BATCH), zeros(1, *W)),
    "baddbmm to 4-D": lambda: torch.baddbmm(zeros(2, 3, 17, 18), zeros(*BATCH), zeros(3, *W)),
    "baddbmm of 2-D": lambda: torch.baddbmm(zeros(18), zeros(*X), zeros(*W)),
    "addbmm": lambda: torch.addbmm(zeros(18), zeros(*BATCH), zeros(1, *W)),
    "mv of a matrix": lambda: torch.mv(zeros(*X), zeros(*W)),
    "mv of another length": lambda: torch.mv(zeros(*X), zeros(18)),
    "linear with 3-D weights": lambda: F.linear(zeros(*BATCH), zeros(3, 18, 32)),
    "linear with another bias": lambda: F.linear(zeros(*X), zeros(18, 32), zeros(17)),
    "linear with a bias of another dtype": lambda: F.linear(zeros(*X), zeros(18, 32), zeros(18, dtype=torch.bfloat16)),
    "einsum of other sizes": lambda: torch.einsum("ik,kj->ij", zeros(17, 32), zeros(31, 18)),
    "einsum to an unknown index": lambda: torch.einsum("ik,kj->iz", zeros(*X), zeros(*W)),
    "einsum to an index twice": lambda: torch.einsum("ik,kj->ijj", zeros(*X), zeros(*W)),
    "einsum of too few operands": lambda: torch.einsum("ik,kj,jl->il", zeros(*X), zeros(*W)),
    "einsum of another rank": lambda: torch.einsum("ik,kj->ij", zeros(*BATCH), zeros(*W)),
    "einsum with a digit": lambda: torch.einsum("1k,kj->1j", zeros(*X), zeros(*W)),
    "out= of another dtype": lambda: torch.mm(zeros(*X), zeros(*W), out=zeros(17, 18, dtype=torch.int64)),
    "attention, mask of another dtype": lambda: F.scaled_dot_product_attention(
        *[zeros(2, 2, 17, 16)] * 3, attn_mask=zeros(17, 17).long()
    ),
    "attention, mask of another shape": lambda: F.scaled_dot_product_attention(
        *[zeros(2, 2, 17, 16)] * 3, attn_mask=zeros(17, 16)
    ),
    "attention, other heads": lambda: F.scaled_dot_product_attention(
        zeros(2, 4, 17, 16), *[zeros(2, 3, 17, 16)] * 2, enable_gqa=True
    ),
    "attention, other widths": lambda: F.scaled_dot_product_attention(
        zeros(2, 2, 17, 16), zeros(2, 2, 17, 32), zeros(2, 2, 17, 32)
    ),
    "attention, other dtypes": lambda: F.scaled_dot_product_attention(
        zeros(2, 2, 17, 16), zeros(2, 2, 17, 16).bfloat16(), zeros(2, 2, 17, 16)
    ),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_torch_refuses_raises_what_torch_raises(call):
    with pytest.raises(Exception) as expected:  # whatever torch raises
        REFUSED[call]()
    context = fp8_autocast(FP8TrainingConfig(fp8_dpa=True))
    with context, pytest.raises(type(expected.value)) as error:
        REFUSED[call]()
    assert str(error.value) == str(expected.value)
    assert not context.report.in_fp8


TAKEN_BY_TORCH = {
    "bias of one element": lambda: F.linear(torch.randn(17, 32), torch.randn(18, 32), torch.randn(1)),
    "a vector through a linear": lambda: F.linear(torch.randn(32), torch.randn(18, 32)),
    "weights of one row": lambda: F.linear(torch.randn(17, 32), torch.randn(1, 32)),
    "a product by a column": lambda: torch.randn(17, 32) @ torch.randn(32, 1),
    "einsum by a vector": lambda: torch.einsum("ik,k->i", torch.randn(17, 32), torch.randn(32)),
    "inner product": lambda: torch.einsum("ik,ik->", torch.randn(17, 32), torch.randn(17, 32)),
    "attention, causal and masked": lambda: F.scaled_dot_product_attention(
        *[torch.randn(2, 2, 17, 16)] * 3, attn_mask=torch.rand(17, 17) > 0.5, is_causal=True
    ),
    "outer product": lambda: torch.randn(64, 1) @ torch.randn(1, 64),
    "outer products": lambda: torch.randn(2, 64, 1) @ torch.randn(2, 1, 64),
    "15 terms": lambda: torch.randn(64, 15) @ torch.randn(15, 64),
    "15 inputs": lambda: F.linear(torch.randn(64, 15), torch.randn(32, 15)),
    "einsum of 15 terms": lambda: torch.einsum("ki,kj->ij", torch.randn(15, 64), torch.randn(15, 64)),
    "bmm of 15 terms": lambda: torch.bmm(torch.randn(2, 17, 15), torch.randn(2, 15, 17)),
    "addmm of 15 terms": lambda: torch.addmm(torch.randn(17), torch.randn(17, 15), torch.randn(15, 17)),
}


@pytest.mark.parametrize("call", TAKEN_BY_TORCH)
def test_short_contractions_vectors_and_what_only_torch_takes_stay_in_high_precision(call):
    torch.manual_seed(3)
    expected = TAKEN_BY_TORCH[call]()
    context = fp8_autocast(FP8TrainingConfig(fp8_dpa=True))
    with context:
        torch.manual_seed(3)
        assert torch.equal(TAKEN_BY_TORCH[call]().nan_to_num(), expected.nan_to_num())
    assert not context.report.in_fp8 and len(context.report.not_in_fp8) == 1
    if "15" in call or "outer" in call:
        assert "fewer than 16" in context.report.entries[0].reason
    assert context.report.entries[0].where.startswith("test_autocast_left_alone.py:")


def test_sixteen_terms_are_in_fp8():
    context = fp8_autocast()
    with context:
        torch.randn(64, 16) @ torch.randn(16, 64)
    assert len(context.report.in_fp8) == 1


def test_a_later_product_alone_may_be_short():
    """Of a chain, and of attention over few keys: what is in FP8 stays so, the rest is counted with its reason."""
    context = fp8_autocast(FP8TrainingConfig(fp8_dpa=True))
    a, b, c = torch.randn(17, 32), torch.randn(32, 8), torch.randn(8, 18)
    q, k, v = torch.randn(2, 2, 17, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 24)
    with context:
        chain = torch.einsum("ij,jk,kl->il", a, b, c)
        attended = F.scaled_dot_product_attention(q, k, v)
    assert [(entry.op, entry.precision) for entry in context.report] == [
        ("einsum", "fp8"),
        ("einsum", "float32"),
        ("attention", "fp8"),
        ("attention", "float32"),
    ]
    for actual, exact in ((chain, a @ b @ c), (attended, F.scaled_dot_product_attention(q, k, v))):
        assert 1e-4 < (actual - exact).norm() / exact.norm() < 0.1


@pytest.mark.parametrize("around", [None, "enabled", "disabled"])
def test_regions_in_which_torch_autocast_is_off(around):
    """An explicit `enabled=False` inside the context counts; one around it does not, nor torch's autocast being out."""
    a, b = torch.randn(17, 32), torch.randn(32, 18)
    context = fp8_autocast()
    with torch.autocast("cpu", torch.bfloat16, enabled=around == "enabled") if around else torch.no_grad(), context:
        first = a @ b
        with torch.autocast("cpu", enabled=False):
            off = a @ b
            with context:
                innermost = a @ b
            with torch.autocast("cpu", torch.bfloat16):
                on_again = a @ b
        last = a @ b
    assert torch.equal(off, a @ b)
    assert [entry.calls for entry in context.report.in_fp8] == [1] * 4
    assert ["enabled=False" in entry.reason for entry in context.report.not_in_fp8] == [True]
    wanted = torch.bfloat16 if around == "enabled" else torch.float32
    assert first.dtype == last.dtype == wanted and innermost.dtype == torch.float32 and on_again.dtype == torch.bfloat16


def test_regions_in_which_torch_autocast_is_off_when_compiled():
    torch._dynamo.reset()
    layer, other = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    context = fp8_autocast(model=layer)

    def forward(x):
        x = layer(x)
        with torch.autocast("cpu", enabled=False):
            return other(x)

    x = torch.randn(17, 32)
    with context:
        y = torch.compile(forward, fullgraph=True, backend="aot_eager")(x)
    assert len(context.report.in_fp8) == 1 and "enabled=False" in context.report.not_in_fp8[0].reason
    with fp8_autocast():
        assert torch.equal(y, forward(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.lm_head = nn.Linear(32, 24)
        self.mixing = nn.Parameter(torch.randn(32, 32))

    def body(self, x):
        for layer in self.layers:
            x = layer(x)
        return x @ self.mixing.mT

    def forward(self, x):
        return self.lm_head(self.body(x))


def call_model(model, x):
    return model(x)


def call_parts(model, x):
    return model.lm_head(model.body(x))


def call_wrapped(model, x):
    return nn.Sequential(model)(x)


@pytest.mark.parametrize("call", [call_model, call_parts, call_wrapped])
@pytest.mark.parametrize(
    ("skip", "left_alone"),
    [
        (None, ["lm_head.weight"]),
        ((), []),
        (("mixing",), ["mixing"]),
        (("*layers.0", "lm_head"), ["layers.0.weight", "lm_head.weight"]),
        (("*layers.*",), ["layers.0.weight", "layers.1.weight"]),
        (("layers",), ["layers.0.weight", "layers.1.weight"]),
    ],
)
def test_skip_without_the_model(skip, left_alone, call):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(17, 32)
    config = FP8TrainingConfig() if skip is None else FP8TrainingConfig(skip=skip)
    context, named = fp8_autocast(config), fp8_autocast(config, model=model)
    for each in (context, named):
        with each:
            y = call(model, x)
        assert len(each.report.in_fp8) == 4 - len(left_alone)
        assert all("config.skip" in entry.reason for entry in each.report.not_in_fp8)
    with named:
        assert torch.equal(call_model(model, x), y)
    y.sum().backward()
    assert set(left_alone) == {name for name, _ in model.named_parameters() if name.rpartition(".")[2] != "bias"} - {
        entry.name.partition("[")[2].rstrip("]") for entry in named.report.in_fp8
    }


@pytest.mark.parametrize("given", [False, True])
def test_skip_names_a_tied_weight_by_either_name(given):
    model = Net()
    model.lm_head = nn.Linear(32, 32)
    model.lm_head.weight = model.layers[0].weight
    context = fp8_autocast(model=model if given else None)
    with context:
        model(torch.randn(17, 32))
    assert len(context.report.in_fp8) == 2 and sum(entry.calls for entry in context.report.not_in_fp8) == 2


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.layer = nn.Linear(32, 32)

    def forward(self, tokens):
        return self.layer(self.embedding(tokens))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.lm_head = nn.Linear(32, 40, bias=False)
        self.lm_head.weight = self.body.embedding.weight

    def forward(self, tokens):
        return self.lm_head(self.body(tokens))


def test_a_head_that_is_tied_to_its_body_is_skipped_without_the_model():
    """The body has all Parameters that the whole model has, but not the name of the head."""
    model, context = Tied(), fp8_autocast()
    with context:
        model(torch.arange(40))
    assert len(context.report.in_fp8) == 1
    assert [entry.reason for entry in context.report.not_in_fp8] == ["left alone: config.skip names its weight"]


def test_skip_without_the_model_follows_new_models():
    context = fp8_autocast()
    for _ in range(3):
        model = Net()
        with context:
            model(torch.randn(17, 32))
        del model
    assert len(context.report.in_fp8) == 3 and [entry.calls for entry in context.report.not_in_fp8] == [3]


def test_skip_that_names_nothing_is_refused():
    config = FP8TrainingConfig(skip=("lm_head", "laters.0"))
    with pytest.raises(ValueError, match=r"skip='laters.0': no weight of Net"):
        fp8_autocast(config, model=Net())
    model = Net()
    with pytest.raises(ValueError, match=r"skip='laters.0'.*model="), fp8_autocast(config):
        model(torch.randn(17, 32))


def test_skip_without_the_model_is_refused_when_compiled():
    torch._dynamo.reset()
    model = Net()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with fp8_autocast(), pytest.raises(RuntimeError, match=r"pass fp8_autocast the model"):
        compiled(torch.randn(17, 32))
    torch._dynamo.reset()
    context = fp8_autocast(FP8TrainingConfig(skip=()))
    with context:
        compiled(torch.randn(17, 32))
    assert len(context.report.in_fp8) == 4
