"""`compile="layers"` for a decoder of transformers that has no fused pieces, alone and through Accelerate."""

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch._dynamo.testing import CompileCounterWithBackend

from octavo import convert_to_fp8, restore, setup_fp8_mixed_precision_training
from octavo.nn import regional

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.fixture
def counter(monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(regional, "BACKEND", counter)
    yield counter
    torch._dynamo.reset()


def build():
    torch.manual_seed(0)
    config = transformers.Phi3Config(**SIZES, num_key_value_heads=2, vocab_size=160, pad_token_id=0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def losses(model, lengths=(9, 17, 23, 40, 31)):
    actual = []
    for length in lengths:
        ids = torch.randint(1, 160, (2, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(ids)
        mask[1, length // 2 :] = 0
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        actual.append(loss.detach())
    return torch.stack(actual)


def test_a_decoder_that_is_not_fused(counter):
    model, plain = build(), build()
    convert_to_fp8(plain, "channel")
    convert_to_fp8(model, "channel", compile="layers")
    assert not model.config.use_cache
    expected = losses(plain)
    frames = []
    for length, loss in zip((9, 17, 23, 40, 31), expected, strict=True):
        torch.testing.assert_close(losses(model, (length,))[0], loss, rtol=1e-4, atol=1e-4)
        frames.append(counter.frame_count)
    assert 0 < frames[2] == frames[-1]
    restore(model)
    assert model.config.use_cache


def test_through_accelerate(counter):
    AcceleratorState._reset_state(reset_partial_state=True)
    with setup_fp8_mixed_precision_training(compile="layers"):
        model = Accelerator(cpu=True).prepare(build())
        losses(model, (9,))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert counter.frame_count > 0
    with pytest.raises(ValueError, match="compile='layers' with backend='ao'"):
        setup_fp8_mixed_precision_training("ao", compile="layers")
