"""Files of a model sharded by FSDP2, merged, in FP8, or adapters alone: those of the same model in one process."""

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

pytest.importorskip("peft")

import decoder_cases
import peft
from transformers import AutoModelForCausalLM

import octavo
from octavo import FastLanguageModel
from octavo.dist.together import OtherRankFailed
from octavo.hf.quantizer import OctavoConfig

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
METHODS = ["merged_16bit", "merged_fp8", "lora"]
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # what a forward gathers is not what is saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    decoder_cases.build("Llama", hidden_size=192, intermediate_size=144).save_pretrained(path)
    return path


def adapted(folder, granularity, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=OctavoConfig(granularity))
    torch.manual_seed(3)
    config = {"r": 4, "target_modules": LINEARS, "task_type": "CAUSAL_LM"} | options
    model = peft.get_peft_model(model, peft.LoraConfig(**config))
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def shard(model, layers):
    for layer in layers:
        fully_shard(layer, mp_policy=POLICY)
    return fully_shard(model, mp_policy=POLICY)


def evaluate(model):
    ids = torch.arange(1, 27).view(2, 13)
    with torch.no_grad():
        model.eval()(input_ids=ids)  # its root has no backward to wait for, and so stays gathered


def save_adapted(rank, folder, out, granularity, options):
    model = shard((whole := adapted(folder, granularity, **options)), whole.get_base_model().model.layers)
    evaluate(model)
    for method in METHODS:
        FastLanguageModel.save_pretrained_merged(model, out / method if rank == 0 else "", save_method=method)
        assert not rank or (out / method / "README.md").exists() or (out / method / "config.json").exists()
    evaluate(model)  # it is what it was
    return {name: type(p).__name__ for name, p in model.named_parameters()}


def files(folder):
    """Contents by name. PEFT writes sets as lists, in an order of each process, here and in its README.md."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}
    if "adapter_config.json" in found:
        found["adapter_config.json"] = sorted(found["adapter_config.json"].replace(b",", b"").split())
    return found


CASES = [
    ("block", {}),
    ("tensor", {}),
    ("channel", {"modules_to_save": ["lm_head", "norm"]}),
    ("channel", {"target_modules": [*LINEARS, "embed_tokens"], "bias": "lora_only"}),
]


@pytest.mark.parametrize(("granularity", "options"), CASES)
def test_files_of_an_adapted_model(folder, tmp_path, granularity, options):
    """On three ranks: 192 rows are even, 144 and those of adapters are not."""
    on_ranks(3, save_adapted, folder, tmp_path / "shards", granularity, options)
    model = adapted(folder, granularity, **options)
    for method in METHODS:
        FastLanguageModel.save_pretrained_merged(model, tmp_path / "one" / method, save_method=method)
        assert files(tmp_path / "shards" / method) == files(tmp_path / "one" / method), method


def save_trained(rank, folder, out, in_fp8):
    model = AutoModelForCausalLM.from_pretrained(folder)
    octavo.convert_to_fp8(model, "block")
    shard(model, model.model.layers)
    if in_fp8:
        octavo.fp8_all_gather(model)
    evaluate(model)
    octavo.export_fp8(model, out)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_files_of_a_trained_model(folder, tmp_path, in_fp8):
    on_ranks(2, save_trained, folder, tmp_path / "shards", in_fp8)
    model = AutoModelForCausalLM.from_pretrained(folder)
    octavo.convert_to_fp8(model, "block")
    octavo.export_fp8(model, tmp_path / "one")
    assert files(tmp_path / "shards") == files(tmp_path / "one")


def save_in_vain(rank, folder, out, method):
    model = adapted(folder, "block")
    model = shard(model, model.get_base_model().model.layers)
    with pytest.raises((OSError, ValueError)) as caught:
        FastLanguageModel.save_pretrained_merged(model, out, save_method=method)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("method", ["merged_16bit", "lora"])
def test_what_rank_0_cannot_write_is_an_error_on_all(folder, tmp_path, method):
    (tmp_path / "file").write_text("")
    first, second = on_ranks(2, save_in_vain, folder, tmp_path / "file", method)
    assert first[0] == "ValueError" and second == (OtherRankFailed.__name__, f"rank 0: {first[1]}")


def save_without_memory(rank, folder, out):
    """Rank 0 cannot keep what is gathered: it goes on gathering with the other."""
    model = adapted(folder, "block")
    model = shard(model, model.get_base_model().model.layers)
    if rank == 0:
        octavo.hf.sharded.alone = lambda _: (_ for _ in ()).throw(MemoryError("no memory left"))
    with pytest.raises((MemoryError, OtherRankFailed), match="no memory left"):
        octavo.export_fp8(model, out)


def test_no_rank_waits_for_one_without_memory(folder, tmp_path):
    on_ranks(2, save_without_memory, folder, tmp_path / "out", limit=120)
    assert not (tmp_path / "out").exists()


def test_parameters_that_zero_has_emptied_are_refused(folder, tmp_path):
    model = adapted(folder, "block")
    weight = model.get_base_model().model.norm.weight
    weight.ds_tensor, weight.data = weight.detach().clone(), torch.empty(0)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: DeepSpeed's ZeRO-3 has emptied"):
        FastLanguageModel.save_pretrained_merged(model, tmp_path / "out")


def test_adapters_of_a_model_without_any(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="save_method='lora' of a LlamaForCausalLM: it has no adapters"):
        FastLanguageModel.save_pretrained_merged(model, tmp_path / "out", save_method="lora")
