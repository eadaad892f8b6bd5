"""FSDP2 with units of any size, made before or after the conversion: fused pieces stay in use, to the bit."""

import pytest
from dist_cases import adamw, config_of, converted, largest_difference, numbers, plain, run, shard, simulated
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule

import octavo

KINDS = {"Llama": "block", "FP8 head": "delayed", "FP8 activations": "current"}
STEPS = 2


def head(model):
    """As torchtitan does."""
    return [*model.model.layers, model.lm_head]


def tail(model):
    """As Accelerate does."""
    return [*model.model.layers, model.model.embed_tokens, [model.model.norm, model.lm_head]]


def linears(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def parts(model):
    """Attentions, MLPs, and all that have weights and are outside of those."""
    inner = [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp, layer.input_layernorm)]
    return [*inner, *model.model.layers, model.model.norm, model.lm_head]


BEFORE = {"head": head, "tail": tail, "parts": parts}  # units that are made of a converted model
AFTER = {"tail": tail, "linears": linears}  # units whose model is converted then


def small(kind):
    return plain(kind, num_hidden_layers=1)


def small_converted(kind, recipe):
    return converted(kind, recipe, num_hidden_layers=1)


def sharded(rank, kind, recipe):
    """Parameters and what was fused, for all units."""
    results = {}
    for name, units in BEFORE.items():
        results[f"{name}, converted before"] = trained(rank, kind, shard(small_converted(kind, recipe), units))
    for name, units in AFTER.items():
        model = shard(small(kind), units)
        units_before = [module for module in model.modules() if isinstance(module, FSDPModule)]
        octavo.convert_to_fp8(model, config_of(kind, recipe))
        assert [module for module in model.modules() if isinstance(module, FSDPModule)] == units_before
        results[f"{name}, converted after"] = trained(rank, kind, model)
    return results


def trained(rank, kind, model):
    outputs = []
    model.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    run(rank, model, kind, adamw(model.parameters()), steps=STEPS)
    report = model.octavo_report
    return {
        "parameters": numbers(model),
        "logits": [output.logits for output in outputs],
        "lost": [line for line in report.to_dict()["fused"] if line not in report.fused],
        "pieces": report.fused,
        "head": "lm_head.x" in report.scaling.statistics(reset=False),
    }


def prepared(rank, kind, recipe):
    """By Accelerate itself, which has no FSDP2 on a CPU unless it is told so."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    model = fsdp2_prepare_model(accelerator, small_converted(kind, recipe))
    return {"by Accelerate": {**trained(rank, kind, model), "a unit": isinstance(model.lm_head, FSDPModule)}}


def test_the_units_of_accelerate_equal_simulated_ranks():
    expected = simulated("FP8 head", "block", build=small_converted, steps=STEPS)
    for results in on_ranks(2, prepared, "FP8 head", "block"):
        result = results["by Accelerate"]
        assert result["a unit"] and result["head"] and result["lost"] == [] and result["logits"] == [None] * STEPS
        assert largest_difference(result["parameters"], expected) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_units_of_any_size_equal_simulated_ranks(kind):
    recipe = KINDS[kind]
    expected = simulated(kind, recipe, build=small_converted, steps=STEPS)
    pieces = list(small_converted(kind, recipe).octavo_report.fused)
    for results in on_ranks(2, sharded, kind, recipe):
        for case, result in results.items():
            assert result["pieces"] == pieces, case
            assert result["lost"] == [], case
            assert result["logits"] == [None] * STEPS, case
            assert result["head"] == (kind == "FP8 head"), case
            assert largest_difference(result["parameters"], expected) == 0, case
