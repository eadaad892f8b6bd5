"""Every script in `examples/hf`, as it stands, on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small import small_llama
from trainer_cases import BYTES, byte_tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "hf"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 256}
    small_llama(vocab_size=BYTES, **sizes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run(script, *arguments):
    command = [sys.executable, FOLDER / script, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_sft_lora(checkpoint, tmp_path):
    said = run("sft_lora.py", checkpoint, "--steps", 2, "--rank", 4, "--out", tmp_path)
    assert "fp8/underflow_mean" in said
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert (tmp_path / "merged" / "model.safetensors").exists()


def test_sft_full(checkpoint, tmp_path):
    said = run("sft_full.py", checkpoint, "--steps", 2, "--out", tmp_path)
    assert "fp8/underflow_mean" in said and "14 of 15" in said
    assert (tmp_path / "bf16" / "model.safetensors").exists()


def test_grpo_lora(checkpoint, tmp_path):
    said = run("grpo_lora.py", checkpoint, "--steps", 2, "--rank", 4, "--completions", 2, "--out", tmp_path)
    assert "rewards/correct/mean" in said and "14 of 15 linears in FP8" in said and "of 14 in backward alone" in said
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_export_then_load_what_was_exported(checkpoint, tmp_path):
    said = run("export.py", checkpoint, tmp_path / "fp8")
    assert "agree to a cosine of 0.9" in said
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8"
    said = run("load_prequantized.py", tmp_path / "fp8")
    assert "frozen in E4M3 per block" in said and "28 adapter matrices have gradients" in said


def test_they_are_short():
    for script in FOLDER.glob("*.py"):
        assert len(script.read_text().splitlines()) < 60, script
