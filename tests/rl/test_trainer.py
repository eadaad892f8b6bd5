"""TRL's GRPOTrainer with an engine of ours: the correction runs, and the gap is in the logs."""

import logging

import pytest
import torch
from rl_cases import adapted, vowels

from octavo import OctavoCallback
from octavo.rl import NativeEngine
from octavo.rl.trainer import OctavoGRPOTrainer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


def trainer(folder, reward=vowels, callbacks=(), cls=OctavoGRPOTrainer, lora_dropout=0.0, **changes):
    model, tokenizer = adapted(folder, dtype=torch.float32, lora_dropout=lora_dropout)
    settings = {
        "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 5,
        "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip
    return cls(
        model,
        reward_funcs=reward,
        args=trl.GRPOConfig(output_dir=str(folder / "out"), **settings | changes),
        train_dataset=datasets.Dataset.from_dict({"prompt": [f"say {i}:" for i in range(6)]}),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_correction_runs(tmp_path, mode):
    run = trainer(tmp_path, vllm_importance_sampling_mode=mode)
    assert isinstance(run.engine, NativeEngine)
    run.train()
    logs = [entry for entry in run.state.log_history if "reward" in entry]
    assert len(logs) == 2
    for entry in logs:
        # FP32, weights only: rollout and trainer agree to the last bits, so every ratio is near 1
        assert entry["sampling/sampling_logp_difference/mean"] < 1e-4
        assert entry["sampling/importance_sampling_ratio/min"] == pytest.approx(1, abs=1e-3)
    assert run.engine.statistics()["prefills"] == 2  # distinct prompts of a step: each goes through the model once


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_is_no_gap(tmp_path, dropout):
    """The correction would take for the gap what a trainer drops and a rollout does not."""
    run = trainer(tmp_path, lora_dropout=dropout)
    assert {module.p for module in run.model.modules() if isinstance(module, torch.nn.Dropout)} <= {0.0}
    run.train()
    logs = [entry for entry in run.state.log_history if "reward" in entry]
    assert all(entry["sampling/sampling_logp_difference/mean"] < 1e-4 for entry in logs)


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="use_vllm=True: TRL would start a vLLM with weights of its own"):
        trainer(tmp_path, use_vllm=True)
    with pytest.raises(ValueError, match="use_vllm=True: TRL would start"):  # by place, too
        OctavoGRPOTrainer(None, vowels, trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, use_vllm=True))
    with pytest.raises(ValueError, match=r"top_p=0.9 with vllm_importance_sampling_correction=True"):
        trainer(tmp_path, top_p=0.9)
    with pytest.raises(ValueError, match=r"min_p=0.1 with vllm_importance_sampling_correction=True"):
        trainer(tmp_path, min_p=0.1)
    assert trainer(tmp_path, min_p=0.1, vllm_importance_sampling_correction=False)._sampling().min_p == 0.1
    for name, value in (("repetition_penalty", 1.2), ("generation_kwargs", {"do_sample": False})):
        with pytest.raises(ValueError, match=f"{name}={value!r}: the engine samples by temperature, .* and min_p"):
            trainer(tmp_path, **{name: value})


def test_equal_rewards_are_not_reported_as_not_learning(tmp_path, caplog):
    run = trainer(tmp_path, lambda completions, **_: [1.0] * len(completions), [OctavoCallback()], beta=0.0)
    logger = logging.getLogger("octavo")
    before, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.WARNING):
        run.train()
    logger.propagate = before
    assert "not seen to learn" not in caplog.text
    assert [e["frac_reward_zero_std"] for e in run.state.log_history if "frac_reward_zero_std" in e] == [1.0, 1.0]
