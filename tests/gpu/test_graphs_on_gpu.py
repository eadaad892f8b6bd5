"""Training steps from CUDA graphs: the same losses and gradients as without, and what is not recorded."""

import multiprocessing
from contextlib import nullcontext

import pytest
import torch

import octavo
from octavo.decoders import graphs
from octavo.nn.frozen import FP8FrozenLinear
from octavo.tools.bench.contenders import Contender
from octavo.tools.bench.prepared_model import PreparedModel
from octavo.tools.bench.random_model import build_causal_lm
from octavo.tools.shapes import LLAMAS, Case

SHAPE = {**LLAMAS["tiny"], "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512}


def make(recipe="channel", *, compile=False):
    case = Case("small", SHAPE, 3, 256, 128, 0, "cuda", frozen=True, rank=8)
    return PreparedModel(case, Contender(f"octavo {recipe}", "octavo", compile, recipe)).model.train()


def make_full(recipe):
    torch.manual_seed(0)
    model = build_causal_lm(SHAPE, layers=3, positions=128, device="cuda").train()
    octavo.convert_to_fp8(model, octavo.FP8TrainingConfig.from_recipe(recipe))
    return model


def batches(count, *, rows=2, length=128):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(512, (rows, length), generator=generator).cuda() for _ in range(count)]


def train(model, data, *, accumulate=1, lr=1e-3):
    """Losses, gradients' norms, and the weights that come out."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    actual = []
    for i, tokens in enumerate(data):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        if (i + 1) % accumulate == 0:
            norms = torch._foreach_norm([p.grad.float() for p in model.parameters() if p.grad is not None])
            actual.append(torch.stack([loss.detach(), *norms]))
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(actual)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("recipe", ["channel", "block"])
def test_as_without(recipe, compile):
    torch._dynamo.reset()
    data = batches(8)
    plain, graphed = make(recipe, compile=compile), make(recipe, compile=compile)
    octavo.use_cuda_graphs(graphed)
    expected, actual = train(plain, data), train(graphed, data)
    assert graphs.recordings(graphed) == 1
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-4)  # atomics add in any order
    assert graphs.reserved_bytes(graphed) > 0


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_full_fine_tuning(recipe):
    data = batches(8)
    plain, graphed = make_full(recipe), make_full(recipe)
    octavo.use_cuda_graphs(graphed)
    torch.testing.assert_close(train(graphed, data, lr=1e-4), train(plain, data, lr=1e-4), rtol=2e-2, atol=1e-4)
    assert graphs.recordings(graphed) == 1


@pytest.mark.parametrize("granularity", ["channel", "block"])
def test_products_in_high_precision(granularity, tmp_path):
    """What comes out is that of the dequantised weights, and a step can be recorded."""
    torch.manual_seed(0)
    reference = build_causal_lm(SHAPE, layers=2, positions=128, device="cuda")
    reference.save_pretrained(tmp_path)
    base, _ = octavo.FastLanguageModel.from_pretrained(
        str(tmp_path), max_seq_length=128, load_in_fp8=granularity, fp8_products=False, tokenizer=False
    )
    frozen = {name: module for name, module in base.named_modules() if isinstance(module, FP8FrozenLinear)}
    assert len(frozen) == 14 and not any(module.fp8_products for module in frozen.values())
    for name, module in frozen.items():
        reference.get_submodule(name).weight.data.copy_(module.dequantize())
    tokens, *data = batches(6)
    actual, expected = base.eval()(tokens).logits.float(), reference.eval()(tokens).logits.float()
    assert torch.nn.functional.cosine_similarity(actual, expected, dim=-1).min() > 0.999
    model = octavo.FastLanguageModel.get_peft_model(base, r=8, use_gradient_checkpointing=False).train()
    octavo.use_cuda_graphs(model)
    losses = train(model, data)[:, 0]
    assert graphs.recordings(model) == 1 and losses.isfinite().all()


def test_products_in_fp8_where_they_pay(tmp_path):
    """Not for so small a model, unless they are asked for; what was decided stays as it is in the graphs."""
    torch.manual_seed(0)
    build_causal_lm(SHAPE, layers=2, positions=128, device="cuda").save_pretrained(tmp_path)
    data = batches(6)
    for asked in (None, True):
        base, _ = octavo.FastLanguageModel.from_pretrained(
            str(tmp_path), max_seq_length=128, load_in_fp8="block", fp8_products=asked, tokenizer=False
        )
        frozen = [module for module in base.modules() if isinstance(module, FP8FrozenLinear)]
        assert all(module.fp8_products is bool(asked) for module in frozen)
        assert any("does not pay" in line for line in base.octavo_fused) is not bool(asked)
        model = octavo.FastLanguageModel.get_peft_model(base, r=8, use_gradient_checkpointing=False).train()
        octavo.use_cuda_graphs(model)
        assert train(model, data)[:, 0].isfinite().all()


def test_accumulation():
    data = batches(8)
    plain, graphed = make(), make()
    octavo.use_cuda_graphs(graphed, after=1)
    expected, actual = train(plain, data, accumulate=2), train(graphed, data, accumulate=2)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-4)


def test_two_forwards_before_one_backward():
    first, second = batches(2)
    plain, graphed = make(), make()
    octavo.use_cuda_graphs(graphed, after=0)
    for model in (plain, graphed):
        losses = [model(input_ids=tokens, labels=tokens, use_cache=False).loss for tokens in (first, second)]
        (losses[0] - losses[1]).backward()
    for mine, theirs in zip(graphed.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=5e-2, atol=1e-3)


def test_a_loss_that_is_thrown_away():
    (tokens,) = batches(1)
    model = make()
    octavo.use_cuda_graphs(model, after=0)
    model(input_ids=tokens, labels=tokens, use_cache=False)
    (recorded,) = graphs._fused_model(model).__dict__["_octavo_graphs"].recorded.values()
    assert not recorded.is_waiting()


def test_other_shapes_masks_and_adapters():
    model, (tokens,) = make(), batches(1)
    octavo.use_cuda_graphs(model, after=0, most=2)

    def loss(**more):
        return model(input_ids=tokens, labels=tokens, use_cache=False, **more).loss

    expected = loss(output_hidden_states=True)  # asks for more than a graph gives
    assert graphs.recordings(model) == 0
    full = torch.ones_like(tokens)
    torch.testing.assert_close(loss(attention_mask=full), expected, rtol=1e-3, atol=1e-3)
    assert graphs.recordings(model) == 1
    padded = full.clone()
    padded[0, :40] = 0
    assert (loss(attention_mask=padded) - expected).abs() > 1e-4
    with torch.no_grad():
        loss()
    model.eval()
    loss()
    model.train()
    with model.disable_adapter(), pytest.raises(ValueError, match="none of its weights is trained"):
        loss()
    assert graphs.recordings(model) == 1
    for length in (64, 32, 16):
        (tokens,) = batches(1, length=length)
        loss().backward()
    assert graphs.recordings(model) == 2
    octavo.use_cuda_graphs(model, False)
    loss().backward()


def after_last_norm(model, look):
    """Not by a hook, nor by a forward of the object's own: what has those is not recorded."""
    norm = graphs._fused_model(model).model.norm
    cls = type(norm)

    def forward(self, x):
        hidden = cls.forward(self, x)
        look(hidden)
        return hidden

    norm.__class__ = type(cls.__name__, (cls,), {"forward": forward})


def test_what_cannot_be_recorded():
    model, (tokens,) = make(), batches(1)
    after_last_norm(model, lambda hidden: float(hidden.float().mean()))  # waits for the GPU
    octavo.use_cuda_graphs(model, after=0)
    with pytest.raises(RuntimeError, match="synchroniz") as caught:
        model(input_ids=tokens, labels=tokens, use_cache=False)
    assert "while a step of (2, 128) tokens was recorded" in caught.value.__notes__[0]
    octavo.use_cuda_graphs(model, False)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_a_recording_that_breaks_off_leaves_random_numbers_as_they_were():
    """In a process of its own: what else such a recording leaves broken in torch would be other tests' trouble."""
    child = multiprocessing.get_context("spawn").Process(target=break_off)
    child.start()
    child.join(120)
    assert child.exitcode == 0


def break_off():
    """Past the look for what waits: the recording itself fails."""
    model, (tokens,) = make(), batches(1)
    graphs._no_waiting = nullcontext
    after_last_norm(model, lambda _: torch.cuda.synchronize())
    octavo.use_cuda_graphs(model, after=0)
    torch.manual_seed(5)
    expected = torch.rand(4, device="cuda")
    torch.manual_seed(5)
    with pytest.raises(RuntimeError, match="captur"):
        model(input_ids=tokens, labels=tokens, use_cache=False)
    assert graphs.recordings(model) == 0
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    x = torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")
    assert x.isfinite().all()


def test_what_is_trained_later_is_trained():
    model, (tokens,) = make(), batches(1)
    octavo.use_cuda_graphs(model, after=0)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    norm = graphs._fused_model(model).model.layers[0].input_layernorm.weight.requires_grad_(True)
    for _ in range(3):
        norm.grad = None
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        assert norm.grad is not None and norm.grad.any()
    assert graphs.recordings(model) == 1


def test_autocast_keeps_no_copy_of_a_weight():
    """Linears in high precision beside those in FP8: autocast keeps their casts, which a recording may not read."""
    torch.manual_seed(0)
    model = build_causal_lm(SHAPE, layers=2, positions=128, device="cuda", dtype=torch.float32).train()
    octavo.convert_to_fp8(model, octavo.FP8TrainingConfig.from_recipe("current", skip=("lm_head", "model.layers.0.*")))
    (tokens,) = batches(1)
    octavo.use_cuda_graphs(model, after=0)

    def loss():
        with torch.autocast("cuda", torch.bfloat16):
            return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    loss().backward()
    assert graphs.recordings(model) == 1
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(-3)
    replayed = loss().detach()
    octavo.use_cuda_graphs(model, False)
    torch.testing.assert_close(replayed, loss().detach(), rtol=1e-3, atol=1e-3)


def test_weights_that_move():
    model, (tokens,) = make(), batches(1)
    octavo.use_cuda_graphs(model, after=0)

    def loss():
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    before = loss()
    del before
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.zeros_like(parameter)
    torch.testing.assert_close(loss(), plain_loss(model, tokens), rtol=1e-4, atol=1e-4)


def plain_loss(model, tokens):
    octavo.use_cuda_graphs(model, False)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def test_weights_written_between_forward_and_backward():
    """A replayed backward would read them without a word; autograd refuses that for any weight."""
    model = make()
    octavo.use_cuda_graphs(model)
    data = batches(4)
    train(model, data[:3])
    assert graphs.recordings(model) == 1
    frozen = next(module for module in model.modules() if isinstance(module, FP8FrozenLinear))
    for weight in (frozen, None):
        loss = model(input_ids=data[3], labels=data[3], use_cache=False).loss
        if weight is None:
            next(p for p in model.parameters() if p.requires_grad).detach().mul_(0.5)
        else:
            frozen.set_weight(frozen.quantized)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss
    train(model, data)
