"""Hooks on the parts of a converted decoder: called once a step, with their effect, and the report says what they cost.

Each hook flips a sign, so that a hook which is not called shows in the loss or in the direction of a gradient.
"""

import copy

import pytest
import torch
from bounds import cosine
from decoder_cases import assert_close_to, batch, build, run
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from octavo import FastLanguageModel, FP8TrainingConfig, convert_to_fp8, restore

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = {
    **{name: f"model.layers.0.self_attn.{name}" for name in LINEARS[:4]},
    **{name: f"model.layers.1.mlp.{name}" for name in (*LINEARS[4:], "act_fn")},
    "norm": "model.layers.1.post_attention_layernorm",
    "attention": "model.layers.0.self_attn",
    "last norm": "model.norm",
    "head": "lm_head",
}


def negated(tensors):
    return tuple(-tensor if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors)


def alike(actual, expected):
    """Losses, and the directions of all gradients, as far as FP8 leaves them."""
    (loss, gradients), (expected_loss, expected_gradients) = actual, expected
    cosines = [cosine(gradient, expected_gradients[name]) for name, gradient in gradients.items()]
    return abs(loss / expected_loss - 1) < 0.03 and min(cosines) > 0.9


def pre_hook(module, seen):
    def call(_module, inputs, kwargs):
        seen.append(1)
        return negated(inputs), {name: -v if name == "hidden_states" else v for name, v in kwargs.items()}

    return module.register_forward_pre_hook(call, with_kwargs=True)


def forward_hook(module, seen):
    def call(_module, _inputs, output):
        seen.append(1)
        return negated(output) if isinstance(output, tuple) else -output

    return module.register_forward_hook(call)


def backward_hook(module, seen):
    def call(_module, gradients, _):
        seen.append(1)
        return tuple(-30 * gradient for gradient in gradients)  # little goes back through q and k

    return module.register_full_backward_hook(call)


def backward_pre_hook(module, seen):
    def call(_module, gradients):
        seen.append(1)
        return negated(gradients)

    return module.register_full_backward_pre_hook(call)


def another_forward(module, seen):
    own = module.forward

    def call(*args, **kwargs):
        seen.append(1)
        output = own(*args, **kwargs)
        return negated(output) if isinstance(output, tuple) else -output

    module.forward = call


HOOKS = (pre_hook, forward_hook, backward_hook, backward_pre_hook, another_forward)
CASES = [(target, hook) for target in TARGETS for hook in HOOKS]
CASES.remove(("attention", backward_hook))  # torch's see no gradient of an input that is passed by name


@pytest.mark.parametrize(("target", "hook"), CASES)
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_a_hook_has_its_effect(target, activations, hook):
    reference, model = build(), build()
    report = convert_to_fp8(model, FP8TrainingConfig.from_recipe("current", activations=activations))
    without = run(model, **batch())
    expected, actual = [], []
    hook(reference.get_submodule(TARGETS[target]), expected)
    hook(model.get_submodule(TARGETS[target]), actual)
    exact = run(reference, **batch())
    assert alike(run(model, **batch()), exact) and not alike(without, exact)
    assert actual == expected == [1]
    alone = target != "last norm" and (activations == "fp8" or target != "attention")
    assert report.hooked == ([TARGETS[target]] if alone else [])
    assert (f"but 1 with hooks called one by one, not fused: {TARGETS[target]}" in str(report)) == alone
    assert (report.to_dict()["fused"] == report.fused) == (not alone)


def test_the_report_knows_hooks_while_they_are_there():
    model = build()
    report = convert_to_fp8(model, FP8TrainingConfig(fp8_head=True))
    before = str(report)
    handles = [linear.register_forward_hook(lambda *_: None) for linear in model.modules() if type(linear) is nn.Linear]
    assert "not fused: lm_head, and the head is in high precision" in report.summary()
    handles += [layer.mlp.up_proj.register_forward_hook(lambda *_: None) for layer in model.model.layers]
    handles += [layer.self_attn.q_proj.register_forward_hook(lambda *_: None) for layer in model.model.layers]
    assert "but 5 with hooks called one by one" in report.summary() and ", …" in report.summary()
    for handle in handles:
        handle.remove()
    assert str(report) == before
    assert str(copy.deepcopy(report)) == before
    del model
    assert str(report) == before


def test_hooks_on_all_modules():
    reference, model = build(), build()
    report = convert_to_fp8(model)
    seen = {}

    def call(module, _inputs, _output):
        seen.setdefault(id(module), []).append(1)

    handle = nn.modules.module.register_module_forward_hook(call)
    try:
        actual, expected = run(model, **batch()), run(reference, **batch())
        assert len(report.hooked) > 14
    finally:
        handle.remove()
    assert_close_to(actual, expected)
    for mine, theirs in zip(model.modules(), reference.modules(), strict=True):
        assert len(seen.get(id(mine), [])) == len(seen.get(id(theirs), [])), type(mine)
    assert not report.hooked


def pruned(linear):
    prune.l1_unstructured(linear, "weight", amount=0.5)


def weight_normed(linear):
    parametrizations.weight_norm(linear)
    with torch.no_grad():
        linear.parametrizations.weight.original0.mul_(-2)


def weight_normed_by_hook(linear):
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(linear)
    with torch.no_grad():
        linear.weight_g.mul_(-2)


@pytest.mark.parametrize("change", [pruned, weight_normed, weight_normed_by_hook])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_weights_that_are_computed(change, when, activations):
    models = reference, model = build(), build()
    config = FP8TrainingConfig.from_recipe("current", activations=activations)
    if when == "after":
        convert_to_fp8(model, config)
    for each in models:
        for name in ("self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj"):
            change(each.model.layers[0].get_submodule(name))
        change(each.lm_head)
    if when == "before":
        convert_to_fp8(model, config)
    assert_close_to(run(model, **batch()), run(reference, **batch()))
    expected = reference.eval()(**batch()).logits
    restore(model.eval())
    torch.testing.assert_close(model(**batch()).logits, expected, rtol=1e-4, atol=1e-4)
    assert parametrize.is_parametrized(model.lm_head) == (change is weight_normed)


def test_a_parametrized_norm_gets_its_gradient():
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    reference, model = build(), build()
    convert_to_fp8(model, FP8TrainingConfig.from_recipe("current", activations="fp8"))
    for each in (reference, model):
        for layer in each.model.layers:
            parametrize.register_parametrization(layer.input_layernorm, "weight", Twice())
    assert_close_to(run(model, **batch()), run(reference, **batch()))


LORA_TARGETS = (
    "self_attn.q_proj", "self_attn.q_proj.base_layer", "self_attn.k_proj.lora_A.default",
    "self_attn.o_proj.lora_B.default", "self_attn.o_proj", "mlp.gate_proj.lora_dropout.default",
    "mlp.up_proj.base_layer", "mlp.down_proj", "mlp.down_proj.lora_A.default", "mlp.act_fn",
)  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_a_frozen_base_and_its_adapters(hook, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    build(**sizes, head_dim=64).to(torch.bfloat16).save_pretrained(tmp_path)
    base, _ = FastLanguageModel.from_pretrained(str(tmp_path), load_in_fp8="channel", tokenizer=False)
    model = FastLanguageModel.get_peft_model(base, r=4, use_gradient_checkpointing=False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    layer = model.get_base_model().model.layers[1]
    for target in LORA_TARGETS:
        module, seen = layer.get_submodule(target), []
        handle = hook(module, seen)
        run(model, **batch())
        assert seen == [1], target
        if handle is None:
            del module.forward
        else:
            handle.remove()


def test_a_forward_that_was_replaced_before_is_not_said_to_be_fused():
    """It calls what the class was then; a linear so treated would multiply in high precision, whatever its class."""
    reference, model = build(), build()
    for each in (reference, model):
        first, second = each.model.layers
        for module in (first.self_attn.k_proj, second.mlp, each):
            another_forward(module, []) if module is not each else setattr(each, "forward", each.forward)
    report = convert_to_fp8(model, FP8TrainingConfig.from_recipe("current"))
    assert "q, k and v in one product (1)" in report.summary()
    assert "MLP with its activation in one function (1)" in report.summary()
    assert "loss not fused: the forward of this LlamaForCausalLM was replaced" in report.summary()
    (entry,) = (entry for entry in report if entry.name == "model.layers.0.self_attn.k_proj")
    assert entry.precision == "float32" and "another forward" in entry.reason
    assert alike(run(model, **batch()), run(reference, **batch()))


class Doubled(nn.Module):
    """A norm with the attributes of Llama's, and another formula."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(norm.weight.detach().clone()), norm.variance_epsilon

    def forward(self, h):
        return 2 * h * self.weight


class Mixer(nn.Linear):
    """What stands in the place of an attention."""

    def forward(self, hidden_states, **_):
        return super().forward(hidden_states), None


@pytest.mark.parametrize("place", ["input_layernorm", "post_attention_layernorm", "self_attn", "mlp", "mlp.act_fn"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_module_that_is_replaced_after_the_conversion(place, recipe):
    models = [build(), build()]
    report = convert_to_fp8(models[0], FP8TrainingConfig.from_recipe(recipe))
    width = models[0].config.hidden_size
    for model in models:
        torch.manual_seed(0)
        new = {"self_attn": Mixer(width, width), "mlp": nn.Linear(width, width), "mlp.act_fn": nn.Tanh()}
        first, second = model.model.layers
        parent, _, name = place.rpartition(".")
        setattr(first.get_submodule(parent), name, new.get(place) or nn.Identity())
        setattr(second.get_submodule(parent), name, new.get(place) or Doubled(getattr(second, place)))
    assert "with hooks" not in report.summary()
    assert alike(run(models[0], **batch()), run(models[1], **batch()))
