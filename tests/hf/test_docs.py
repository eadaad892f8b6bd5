"""Examples in README and docs that need Hugging Face's libraries; the fine-tune of the README trains."""

import json
from pathlib import Path

from pages import README, ROOT, blocks, examples, run_each
from small import small_llama
from trainer_cases import BYTES, byte_tokenizer

MODEL, INSTRUCT = '"meta-llama/Llama-3.1-8B"', '"meta-llama/Llama-3.1-8B-Instruct"'


def small_model(folder: Path) -> str:
    """A small model on disk, as code names it."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 256}
    small_llama(vocab_size=BYTES, **sizes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return f'"{folder}"'


def changed(code: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    return code


def test_the_fine_tune_trains(tmp_path: Path):
    """As it stands, but for the model, which is small and on disk, fewer steps, and the CPU."""
    (tmp_path / "notes.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 48)
    (code,) = (code for code in blocks(README, "python") if MODEL in code)
    assert len(code.strip().splitlines()) <= 13
    changes = {
        MODEL: small_model(tmp_path / "model"),
        '"notes.txt"': f'"{tmp_path / "notes.txt"}"',
        '"runs/notes': f'"{tmp_path}/runs',
        "max_steps=100": "max_steps=6, use_cpu=True, report_to=[], disable_tqdm=True",
    }
    code = changed(code, changes)
    code += f'\nimport json\njson.dump(trainer.state.log_history, open("{tmp_path}/history.json", "w"))\n'
    run_each([code], imports=("octavo.nn", "trl", "peft"))
    losses = [entry["loss"] for entry in json.loads((tmp_path / "history.json").read_text()) if "loss" in entry]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert (tmp_path / "runs" / "adapter" / "adapter_model.safetensors").exists()


def test_grpo_of_trl_runs(tmp_path: Path):
    (code,) = (code for code in blocks(ROOT / "docs" / "rl.md", "python") if "GRPOTrainer" in code)
    changes = {
        INSTRUCT: small_model(tmp_path / "model"),
        '"runs/brief"': f'"{tmp_path}/runs"',
        "max_steps=100": "max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True",
        "max_completion_length=128": "max_completion_length=8",
    }
    run_each([changed(code, changes)], imports=("octavo.nn", "trl", "peft"))
    assert (tmp_path / "runs" / "checkpoint-2" / "adapter_model.safetensors").exists()


def test_python_runs():
    codes = [code for code in examples(hugging_face=True) if MODEL not in code and INSTRUCT not in code]
    assert len(codes) > 2
    run_each(codes, imports=("octavo.nn", "accelerate", "peft", "transformers"))
