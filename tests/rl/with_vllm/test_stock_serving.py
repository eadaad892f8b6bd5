"""Stock vLLM, without anything of ours in it, serves what `export_fp8` writes of a model in FP8 per channel."""

import os

import pytest
import torch
from decoder_cases import build

import octavo
from octavo import FastLanguageModel

pytest.importorskip("vllm")


def test_per_channel(tmp_path, monkeypatch):
    for name, value in (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")):
        monkeypatch.setenv(name, os.environ.get(name, value))
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 64}
    build(**sizes, vocab_size=192).save_pretrained(tmp_path / "model")
    model, _ = FastLanguageModel.from_pretrained(str(tmp_path / "model"), load_in_fp8="channel", tokenizer=False)
    octavo.export_fp8(model, tmp_path / "fp8")
    from vllm import LLM, SamplingParams

    set_num_threads = torch.set_num_threads
    llm = LLM(
        str(tmp_path / "fp8"), skip_tokenizer_init=True, enforce_eager=True, kv_cache_memory_bytes=2**24,
        dtype="bfloat16", logprobs_mode="raw_logprobs",
    )  # fmt: skip
    monkeypatch.setattr(torch, "set_num_threads", set_num_threads)
    served = llm.llm_engine.model_executor.driver_worker.get_model()
    for i, layer in enumerate(served.model.layers):
        ours = model.model.layers[i]
        groups = {
            layer.self_attn.qkv_proj: [ours.self_attn.q_proj, ours.self_attn.k_proj, ours.self_attn.v_proj],
            layer.self_attn.o_proj: [ours.self_attn.o_proj],
            layer.mlp.gate_up_proj: [ours.mlp.gate_proj, ours.mlp.up_proj],
            layer.mlp.down_proj: [ours.mlp.down_proj],
        }
        for theirs, members in groups.items():
            data, scale = (torch.cat(parts) for parts in zip(*(_bytes(one) for one in members), strict=True))
            assert torch.equal(theirs.weight.t().view(torch.uint8), data)  # the layout that its kernel wants
            assert torch.equal(theirs.weight_scale.flatten(), scale.flatten())
    prompt = [5, 9, 33, 41, 7]
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=1, logprobs=0, ignore_eos=True, detokenize=False)
    part = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0]
    tokens = list(part.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    actual = torch.tensor([places[token].logprob for token, places in zip(tokens, part.logprobs, strict=True)])
    assert (actual - expected).abs().mean() < 0.1  # FP8 products on both sides: roundings flip


def _bytes(linear):
    data, scale = linear.quantized
    return data.view(torch.uint8), scale
