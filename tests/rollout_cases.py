"""Tiny models for rollouts: a base frozen in FP8, adapters with values, prompts of different lengths."""

import decoder_cases  # which skips tests where there is no transformers
import pytest
import torch

from octavo.decoders.fuse import fuse_loaded
from octavo.nn.frozen import FP8FrozenLinear

peft = pytest.importorskip("peft")

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VOCABULARY = decoder_cases.SIZES["vocab_size"]
PROMPTS = [[5, 9, 3], [7, 7, 1, 2, 8, 4, 6, 11, 30, 2, 9], [12], [90, 14, 3, 3, 17, 21]]
FAMILIES = {  # with what makes each of them special
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 6},
    "Gemma": {"tie_word_embeddings": True},
    "Gemma2": {"sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Gemma3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
}


def plain(family="Llama", dtype=torch.float32, **changes):
    """A model in high precision, fused as it is when it is loaded."""
    model = decoder_cases.build(family, **FAMILIES.get(family, {}) | {"eos_token_id": None} | changes).to(dtype)
    if family == "Gemma2":
        model.config._attn_implementation = "eager"  # sdpa does not bend scores
    model.requires_grad_(False)
    fuse_loaded(model)
    return model


def frozen(family="Llama", granularity="block", dtype=torch.float32, *, products=True, **changes):
    """A model whose linears are frozen in FP8."""
    model = decoder_cases.build(family, **FAMILIES.get(family, {}) | {"eos_token_id": None} | changes).to(dtype)
    if family == "Gemma2":
        model.config._attn_implementation = "eager"
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.endswith(LINEARS):
            new = FP8FrozenLinear.from_linear(module, granularity, name=name)
            new.fp8_products = products
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)
    fuse_loaded(model)
    return model


def adapted(model, r=4, seed=0, autocast=True):
    """The model with adapters on every linear, none of them zero."""
    from octavo.hf.lora import install  # which needs PEFT

    install()
    config = peft.LoraConfig(r=r, lora_alpha=8, target_modules=list(LINEARS), task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=autocast)
    move_adapters(adapted, seed)
    return adapted


def move_adapters(model, seed=0, std=0.1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_A" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def hf_generate(model, prompts, new, **options):
    """What transformers' generate gives, prompt by prompt: without padding, which would round elsewhere."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **options
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@torch.no_grad()
def full_logprobs(model, prompt, tokens, temperature=1.0):
    """Log-probabilities of a completion from one forward over all of it."""
    training = model.training
    model.eval()
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().cpu() / temperature
    model.train(training)
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def gaps(model, prompts, completions, temperature=1.0):
    """|log p of the rollout − log p of a full forward| of every token."""
    found = []
    for completion in completions:
        expected = full_logprobs(model, prompts[completion.prompt], completion.tokens, temperature)
        found.append((torch.tensor(completion.logprobs) - expected).abs())
    return torch.cat(found)
