"""Models in FP8, converted or frozen, with adapters or without, through `pickle`, `torch.save` and `copy.deepcopy`."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from small import SIZES, small_llama, tokens
from torch import nn

import octavo
from octavo import FastLanguageModel, FP8TrainingConfig
from octavo.nn.frozen import FP8FrozenLinear
from octavo.ops.weight import are_neighbours

WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}  # so that groups are fused


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"pickle": by_pickle, "torch.save": by_torch, "deepcopy": copy.deepcopy}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    small_llama(**WHOLE_BLOCKS).save_pretrained(path)
    return str(path)


def load(folder, **options):
    return FastLanguageModel.from_pretrained(folder, tokenizer=False, **{"load_in_fp8": True} | options)[0]


def adapted(folder, **options):
    model = FastLanguageModel.get_peft_model(load(folder, **options), r=4, use_gradient_checkpointing=False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


def converted(_folder):
    model = small_llama(**WHOLE_BLOCKS)
    model.report = octavo.convert_to_fp8(model, FP8TrainingConfig(activations="fp8"))  # delayed; every fused piece
    return model


MODELS = {
    "frozen": adapted,
    "frozen, tensor": lambda folder: adapted(folder, load_in_fp8="tensor"),
    "full": lambda folder: load(folder, full_finetuning=True),
    "converted": converted,
}


def train(model, steps=3):
    optimizer = torch.optim.SGD([p for p in model.train().parameters() if p.requires_grad], lr=0.1)
    losses = []
    for i in range(steps):
        loss = model(input_ids=tokens(seed=i), labels=tokens(seed=i)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_copy_is_what_it_was_and_trains_alike(folder, kind, way):
    model = MODELS[kind](folder)
    train(model, 2)  # with histories of its scales
    again = WAYS[way](model)
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens()).logits, model.eval()(tokens()).logits)
    assert train(again) == train(model)
    mine = [p for p in model.parameters() if p.requires_grad]
    for actual, expected in zip((p for p in again.parameters() if p.requires_grad), mine, strict=True):
        assert torch.equal(actual, expected) and actual.data_ptr() != expected.data_ptr()


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_frozen_weights_take_no_more_room_and_lie_side_by_side(folder, way):
    model = load(folder)
    assert len(pickle.dumps(model)) < 1.1 * sum(p.nbytes for p in model.parameters()) + 200_000
    again = WAYS[way](model)
    weights = [m.weight for m in again.modules() if isinstance(m, FP8FrozenLinear)]
    stored = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights}
    assert sum(stored.values()) == sum(w.numel() for w in weights)
    attention = again.model.layers[0].self_attn
    assert are_neighbours([attention.q_proj.weight.data, attention.k_proj.weight.data, attention.v_proj.weight.data])
    with pytest.raises(ValueError, match="full_finetuning=True"):
        again.requires_grad_(True)


def test_in_a_fresh_process(folder, tmp_path):
    """Which has loaded nothing before: PEFT and transformers have yet to hear of what the model needs of them."""
    model = load(folder)
    torch.save(model, tmp_path / "model.pt")
    torch.save(model(tokens()).logits, tmp_path / "logits.pt")
    code = (
        "import torch\n"
        f"model = torch.load(r'{tmp_path / 'model.pt'}', weights_only=False)\n"
        f"ids = torch.tensor({tokens().tolist()})\n"
        f"assert torch.equal(model(ids).logits, torch.load(r'{tmp_path / 'logits.pt'}'))\n"
        "import peft\n"
        "model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=['q_proj', 'up_proj'])).train()\n"
        "assert type(model.base_model.model.model.layers[0].mlp.up_proj).__name__ == 'FP8LoraLinear'\n"
        "model(input_ids=ids, labels=ids).loss.backward()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_copy_keeps_masters_and_so_does_a_larger_embedding(folder):
    model = copy.deepcopy(load(folder, full_finetuning=True))
    model.resize_token_embeddings(SIZES["vocab_size"] + 2)
    train(model, steps=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    assert all("weight_low" in optimizer.state[p] for p in model.parameters())
