"""`fast_inference=True` where vLLM is installed: it is what `model.generate` uses, under TRL's GRPOTrainer, too."""

import pytest
import torch
from decoder_cases import build
from trainer_cases import BYTES, byte_tokenizer

from octavo import FastLanguageModel
from octavo.rl import attached, fallbacks

pytest.importorskip("vllm")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


def test_grpo(tmp_path, caplog):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 96}
    build(vocab_size=BYTES, **sizes).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(tmp_path / "model"), load_in_fp8=True, fast_inference=True, max_lora_rank=16, gpu_memory_utilization=0.01
    )
    assert "rollouts by the vllm engine: vLLM is installed" in caplog.text
    model = FastLanguageModel.get_peft_model(model, r=16)
    config = trl.GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, max_steps=3, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=8, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1,
        learning_rate=1e-3,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model, lambda completions, **_: [float(len(set(text))) for text in completions], config,
        datasets.Dataset.from_dict({"prompt": ["1 + 1 =", "2 + 3 =", "9", "4 + 4 ="]}), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    engine = attached(model)
    assert engine.name == "vllm" and engine.statistics()["tokens"] > 0 and not fallbacks(model)
    assert engine.own_weight_bytes() == 0
    assert all(torch.isfinite(p).all() for p in model.parameters() if p.requires_grad)
    said = model.fast_generate("1 + 1 =")[0].outputs[0]
    assert len(said.token_ids) <= 16 and said.text == tokenizer.decode(said.token_ids, skip_special_tokens=True)
