"""Calls that have nothing to do with one another: from several threads at once, or after one that broke off."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from decoder_cases import batch, build, run
from torch import nn

from octavo import FastLanguageModel, FP8TrainingConfig, convert_to_fp8

KINDS = ("trained", "FP8 activations", "frozen", "LoRA")
WHOLE_BLOCKS = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}


def converted(kind, folder):
    """A Qwen3: its q_norm, if it has a hook, is called between q and k."""
    if kind in ("trained", "FP8 activations"):
        model = build("Qwen3")
        activations = "fp8" if kind == "FP8 activations" else "bf16"
        convert_to_fp8(model, FP8TrainingConfig.from_recipe("current", activations=activations))
        return model
    build("Qwen3", **WHOLE_BLOCKS, head_dim=64, pad_token_id=None).to(torch.bfloat16).save_pretrained(folder)
    model, _ = FastLanguageModel.from_pretrained(str(folder), load_in_fp8="channel", tokenizer=False)
    if kind == "LoRA":
        model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    return model


def between_q_and_k(model, call):
    """Call something in every attention, when q has been taken and k and v have not."""

    def hook(*_):
        call()

    for name, module in model.named_modules():
        if name.endswith("q_norm"):
            module.register_forward_hook(hook)


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_at_once(kind, tmp_path):
    """Both have computed q, k and v, and taken q, before either goes on."""
    model = converted(kind, tmp_path).eval()
    inputs = [torch.randint(1, 160, (2, 9), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    with torch.no_grad():
        expected = [model(input_ids=ids).logits for ids in inputs]
    barrier = threading.Barrier(2)
    between_q_and_k(model, barrier.wait)

    def logits(ids):
        with torch.no_grad():  # of this thread alone
            return model(input_ids=ids).logits

    with ThreadPoolExecutor(2) as pool:
        actual = list(pool.map(logits, inputs))
    for mine, alone in zip(actual, expected, strict=True):
        assert torch.equal(mine, alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_after_a_call_that_broke_off(kind, tmp_path, checkpointing):
    """In the middle of an attention: nothing of that batch is in the next one."""
    model = converted(kind, tmp_path).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    if kind == "frozen":
        model.get_input_embeddings().weight.requires_grad_(True)
    breaks = []

    def call():
        if breaks:
            raise KeyboardInterrupt

    between_q_and_k(model, call)
    loss, gradients = run(model, **batch(rows=2))
    breaks.append(True)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=batch(rows=2)["input_ids"].flip(1), labels=batch(rows=2)["labels"])
    breaks.clear()
    again, gradients_again = run(model, **batch(rows=2))
    assert torch.equal(again, loss)
    assert all(torch.equal(gradient, gradients_again[name]) for name, gradient in gradients.items())


def replica_of(module):
    """As `torch.nn.parallel.replicate` makes one for each GPU."""
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = replica_of(child) if child is not None else None
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        setattr(replica, name, tensor)
    return replica


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_of_data_parallel_are_refused(kind, tmp_path):
    model = converted(kind, tmp_path)
    with pytest.raises(ValueError, match=r"nn\.DataParallel copies a model to several GPUs"):
        replica_of(model)(input_ids=batch()["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_computes_by_itself(kind, tmp_path):
    """Its own weights and hooks, in the same fused pieces."""
    model = converted(kind, tmp_path).eval()
    ids = batch(rows=2)["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        twin = copy.deepcopy(model)
        assert torch.equal(twin(input_ids=ids).logits, expected)
        linear = next(module for name, module in twin.named_modules() if name.endswith("1.self_attn.v_proj"))
        linear.register_forward_hook(lambda _module, _inputs, output: -output)
        assert not torch.allclose(twin(input_ids=ids).logits, expected, atol=0.1)
        assert torch.equal(model(input_ids=ids).logits, expected)
