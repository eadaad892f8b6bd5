"""DeepSpeed itself, where it is installed: LoRA on a frozen FP8 base and full fine-tuning, the same by every stage.

`test_freed_weights.py` has what ZeRO-3 does to weights without DeepSpeed.
"""

import sys

import pytest
import torch
from dist_cases import RATE, batch, config_of, plain
from frozen_cases import SIZES, adapted
from ranks import on_ranks

import octavo

pytest.importorskip("deepspeed")


def losses(rank, kind, stage):
    """Losses of two steps, whether fused pieces were used, and the bytes of frozen weights after forward."""
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # which compiles a library, and is for speed
    deepspeed.init_distributed("gloo")
    model = adapted("block") if kind == "LoRA" else plain(kind, **SIZES)
    if kind != "LoRA":
        octavo.convert_to_fp8(model, config_of(kind, "block"))
    settings = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        },
    }
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    found, kept = [], 0
    for step in range(2):
        output = engine(**batch("Llama", step, rank))
        assert output.logits is None
        kept = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        engine.backward(output.loss)
        engine.step()
        found.append(output.loss.item())
    report = (model.get_base_model() if kind == "LoRA" else model).octavo_report
    assert report.hooked == [] and report.unfused == {}
    return found, kept


@pytest.mark.parametrize("kind", ["LoRA", "FP8 head", "FP8 activations"])
def test_all_stages_train_alike(kind):
    expected = on_ranks(2, losses, kind, 2)
    actual = on_ranks(2, losses, kind, 3)
    assert [found for found, _ in actual] == [found for found, _ in expected]
    if kind == "LoRA":
        assert all(kept == 0 for _, kept in actual)
