"""Norms and rotations of fused decoders, against those of transformers: the same bits, and few operators."""

import pytest
import torch
from bounds import cosine
from decoder_cases import batch, build
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from octavo import FP8TrainingConfig, convert_to_fp8
from octavo.decoders.match import norm_of
from octavo.numerics.norm import rms_norm
from octavo.numerics.rotary import Heads, rotary

BF16 = torch.bfloat16


@pytest.mark.parametrize("cls", [LlamaRMSNorm, Gemma3RMSNorm])
def test_norms_have_the_bits_of_transformers(cls):
    module = cls(64, eps=1e-3).to(BF16)
    torch.nn.init.normal_(module.weight)
    h = torch.randn(33, 64).to(BF16)
    norm = norm_of(module)
    assert norm.eps == 1e-3 and torch.equal(rms_norm(h, norm)[0], module(h))
    assert norm_of(torch.nn.RMSNorm(64)) is None


def test_rotations_have_the_bits_of_transformers():
    heads = Heads(4, 2, 16)
    qkv, angle = torch.randn(2, 9, heads.features).to(BF16), torch.randn(1, 9, 8).repeat(1, 1, 2)
    cos, sin = angle.cos().to(BF16), angle.sin().to(BF16)
    q, k, v = (part.view(2, 9, -1, 16) for part in qkv.split([64, 32, 32], dim=-1))
    expected = *apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2), v
    actual = rotary(qkv.flatten(0, 1), cos[0], sin[0], heads)
    for mine, wanted in zip(actual, expected, strict=True):
        assert torch.equal(mine.view(wanted.shape), wanted)


class Count(TorchDispatchMode):
    """Counts what computes or copies something as large as the hidden states, by name."""

    VIEWS = ("view", "transpose", "detach", "alias", "slice", "split", "expand", "unsqueeze", "permute", "new_empty")

    def __init__(self, least):
        super().__init__()
        self.least, self.names = least, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        large = any(isinstance(x, torch.Tensor) and x.numel() >= self.least for x in args)
        if large and not name.startswith("octavo") and not any(view in name for view in self.VIEWS):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_a_layer_computes_in_few_steps(family, activations):
    """Forward: attention and the residual streams. Backward: attention, and at most one addition."""
    model = build(family).to(BF16)
    convert_to_fp8(model, FP8TrainingConfig(activations=activations))
    layer, ids = model.model.layers[0], batch()["input_ids"]
    h = model.get_input_embeddings()(ids).detach().requires_grad_()
    positions = model.model.rotary_emb(h, torch.arange(ids.shape[1])[None])
    with Count(h.numel()) as forward:
        out = layer(h, position_embeddings=positions, attention_mask=None)
    gradient = torch.randn_like(out)
    with Count(h.numel()) as backward:
        out.backward(gradient)
    steps = [[name for name in each.names if "attention" not in name] for each in (forward, backward)]
    additions = [1, 0] if activations == "bf16" else [2, 1]
    assert steps == [["aten.add.Tensor"] * count for count in additions]


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3"])
def test_tokens_after_a_cache_see_what_it_holds(family):
    model = build(family).eval()
    convert_to_fp8(model, FP8TrainingConfig.from_recipe("channel"))  # each token by a scale of its own
    ids = batch()["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[:, 8:]
        past = model(input_ids=ids[:, :8], use_cache=True).past_key_values
        actual = model(input_ids=ids[:, 8:], past_key_values=past, use_cache=True).logits
        alone = model(input_ids=ids[:, 8:], use_cache=False).logits
    assert cosine(actual, expected) > 0.999 > cosine(alone, expected)
