"""A small Llama and what tests of loading need of it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 256,
    "hidden_size": 192,  # neither this nor the next is a multiple of 128
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def small_llama(seed=0, dtype=torch.bfloat16, **changes):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | changes)).to(dtype)
    with torch.no_grad():  # weights large enough to matter beside the residual stream
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(3)
    return model


def tokens(batch=2, length=20, seed=1):
    return torch.randint(1, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))
