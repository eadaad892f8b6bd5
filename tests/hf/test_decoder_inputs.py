"""Converted decoders with every kind of input, and in unusual states: wrapped, frozen, copied, unknown."""

import copy

import pytest
import torch
from decoder_cases import assert_close_to, batch, build, run
from torch import nn

import octavo
from octavo import FP8Linear, FP8TrainingConfig, convert_to_fp8, restore

transformers = pytest.importorskip("transformers")


def test_labels_in_other_ways():
    """By position, with the count of a whole accumulation, or shifted already: as the original takes them."""
    reference, model = build(), build()
    convert_to_fp8(model, precision="bf16")
    ids, labels = batch()["input_ids"], batch()["labels"]
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    for args, kwargs in (
        ((ids, None, None, None, None, labels), {}),
        ((ids,), {"labels": labels}),
        ((ids, torch.ones_like(ids)), {"labels": labels}),
        ((), {"input_ids": ids, "labels": labels, "num_items_in_batch": torch.tensor(123)}),
        ((), {"input_ids": ids, "labels": labels, "num_items_in_batch": 123}),
        ((), {"input_ids": ids, "labels": labels, "shift_labels": shifted}),
        ((), {"input_ids": ids, "labels": labels, "output_hidden_states": True}),
        ((), {"input_ids": ids, "labels": labels, "use_cache": True}),
        ((), {"input_ids": ids, "labels": labels, "logits_to_keep": 0}),
        ((), {"input_ids": ids, "labels": labels, "return_dict": True}),
    ):
        expected, actual = reference(*args, **kwargs), model(*args, **kwargs)
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-5)
        assert (actual.hidden_states is None) == (expected.hidden_states is None)
        assert (actual.past_key_values is not None) == ("use_cache" in kwargs or len(args) == 6)
    tuple_of = model(input_ids=ids, labels=labels, return_dict=False)
    assert isinstance(tuple_of, tuple)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side):
    reference, model = build(), build()
    convert_to_fp8(model)
    inputs = batch()
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 15:] = 0
    mask[2, 9:] = 0
    if side == "left":  # where transformers trains the first token of a row on padding, and we do not
        mask = mask.flip(1)
        inputs["labels"][mask.diff(dim=1, prepend=mask[:, :1]) == 1] = -100
    inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
    assert_close_to(run(model, **inputs, attention_mask=mask), run(reference, **inputs, attention_mask=mask))


def test_inputs_embeds():
    reference, model = build(), build()
    convert_to_fp8(model)
    embeds = torch.randn(2, 11, 64)
    labels = batch(2, 11)["labels"]
    actual, expected = (run(m, inputs_embeds=embeds, labels=labels) for m in (model, reference))
    assert_close_to(actual, expected)


@pytest.mark.parametrize("family", ["Llama", "Gemma"])
@pytest.mark.parametrize("fp8_head", [False, True])
def test_tied_embeddings(family, fp8_head):
    reference, model = (build(family, tie_word_embeddings=True) for _ in range(2))
    convert_to_fp8(model, FP8TrainingConfig(fp8_head=fp8_head))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert_close_to(run(model, **batch()), run(reference, **batch()))


class Wrapper(nn.Module):
    """As PEFT's LoRA does it: the linear inside, a small product beside it."""

    def __init__(self, linear):
        super().__init__()
        self.base_layer = linear
        self.a, self.b = nn.Linear(linear.in_features, 2, bias=False), nn.Linear(2, linear.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("of_mlp", ["up_proj", "down_proj"])
def test_wrapped_projections_run_one_by_one(of_mlp, when):
    expected = run(build(), **batch())
    model = build()
    if when == "after":
        convert_to_fp8(model)
    for layer in model.model.layers:
        layer.self_attn.v_proj = Wrapper(layer.self_attn.v_proj)
        setattr(layer.mlp, of_mlp, Wrapper(getattr(layer.mlp, of_mlp)))
    if when == "before":
        report = convert_to_fp8(model, FP8TrainingConfig(skip=("lm_head", "a", "b")))
        assert "q, k and v" not in report.summary() and "MLP" not in report.summary()
    assert isinstance(model.model.layers[0].self_attn.v_proj.base_layer, FP8Linear)
    loss, gradients = run(model, **batch())
    names = {name.replace(".base_layer", "") for name in gradients}
    assert names >= set(expected[1]) and "model.layers.0.self_attn.v_proj.b.weight" in names
    gradients = {name.replace(".base_layer", ""): g for name, g in gradients.items()}
    assert_close_to((loss, {name: gradients[name] for name in expected[1]}), expected)


def test_a_skipped_projection_breaks_its_group_only():
    model = build()
    report = convert_to_fp8(model, FP8TrainingConfig(skip=("lm_head", "model.layers.0.self_attn.q_proj")))
    assert "q, k and v in one product (1)" in report.summary()
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert_close_to(run(model, **batch()), run(build(), **batch()))


@pytest.mark.parametrize("frozen", ["all but the norms", "lora-like"])
def test_frozen_weights(frozen):
    model = build()
    convert_to_fp8(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or (frozen == "lora-like" and "q_proj" in name))
    _, gradients = run(model, **batch())
    assert set(gradients) == {name for name, p in model.named_parameters() if p.requires_grad}


def test_deepcopy():
    model = build()
    report = convert_to_fp8(model, FP8TrainingConfig(fp8_head=True))
    twin = copy.deepcopy(model)
    loss, gradients = run(twin, **batch())
    assert not report.scaling.statistics()  # the copy learned, not the original
    expected = run(model, **batch())
    assert torch.equal(loss, expected[0]) and all(torch.equal(g, gradients[name]) for name, g in expected[1].items())
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert torch.equal(run(model, **batch())[0], expected[0])
    restore(twin)
    assert type(twin.model.layers[0].mlp.up_proj) is nn.Linear
    assert isinstance(model.model.layers[0].mlp.up_proj, FP8Linear)


def test_training_lowers_the_loss():
    """Twenty steps: histories roll with the optimiser, and both models learn alike."""
    losses = {}
    for fp8 in (False, True):
        model = build()
        report = convert_to_fp8(model) if fp8 else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(20):
            loss, _ = run(model, **batch())
            optimizer.step()
        losses[fp8] = loss.item()
    assert report.scaling.step_count == 20
    assert losses[True] < 3 and abs(losses[True] / losses[False] - 1) < 0.1


def test_architectures_it_does_not_know_get_plain_linears():
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=160,
        max_position_embeddings=64, word_embed_proj_dim=64, dropout=0.0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    reference = copy.deepcopy(model)
    report = convert_to_fp8(model)
    assert len(report.in_fp8) == 12 and not report.fused
    assert_close_to(run(model, **batch()), run(reference, **batch()))
    restore(model)
    with pytest.raises(ValueError, match="fp8_head=True"):
        convert_to_fp8(model, FP8TrainingConfig(fp8_head=True))
    assert not any(isinstance(m, FP8Linear) for m in model.modules())


@pytest.mark.parametrize("family", ["Gemma2", None])
def test_an_fp8_head_that_cannot_be_is_an_error_and_changes_nothing(family):
    model = build(family) if family else nn.Sequential(nn.Linear(8, 8))
    before = {name: type(m) for name, m in model.named_modules()}
    with pytest.raises(ValueError, match="fp8_head=True"):
        convert_to_fp8(model, FP8TrainingConfig(fp8_head=True))
    assert {name: type(m) for name, m in model.named_modules()} == before
    convert_to_fp8(model)  # still possible


def test_the_planner_has_no_say_in_emulation(monkeypatch):
    assert len(convert_to_fp8(build(), tokens=64).in_fp8) == 14
    monkeypatch.setattr(octavo.convert, "has_fp8_tensor_cores", lambda _: True)  # as on a GPU
    with pytest.raises(ValueError, match="does not pay at 64 tokens"):
        convert_to_fp8(build(), tokens=64)
    assert len(convert_to_fp8(build(), FP8TrainingConfig(emulate=True), tokens=64).in_fp8) == 14
    assert len(convert_to_fp8(build()).in_fp8) == 14  # nobody asked
    with pytest.raises(ValueError, match="tokens=0"):
        convert_to_fp8(build(), tokens=0)


def test_precision_is_checked():
    with pytest.raises(ValueError, match="precision='fp16'"):
        convert_to_fp8(build(), precision="fp16")


def test_a_linear_of_another_conversion_is_in_no_group():
    """It has a recipe and a scaling state of its own."""
    model, other = build(), build()
    convert_to_fp8(model)
    report = convert_to_fp8(other, FP8TrainingConfig.from_recipe("block"))
    for name in ("self_attn.q_proj", "mlp.up_proj"):
        parent, _, attribute = name.partition(".")
        setattr(model.model.layers[0].get_submodule(parent), attribute, other.model.layers[0].get_submodule(name))
    assert_close_to(run(model, **batch()), run(build(), **batch()))
    assert {"model.layers.0.self_attn.qkv.x", "model.layers.0.mlp.gate_up.x"} == {
        name for name in report.scaling.statistics() if name.endswith(".x")
    }
