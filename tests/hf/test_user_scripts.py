"""Trainers as people write them: gradients and updates are those of the plain model, within FP8's rounding.

Losses of a few steps hardly move where a gradient is wrong. Norms of gradients, and the direction of what training has
changed, show it at once.
"""

import peft
import pytest
import torch
from decoder_cases import build
from torch.nn.functional import cosine_similarity, cross_entropy
from trainer_cases import SETTINGS, logs, norms, rows
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from octavo import FP8TrainingConfig, OctavoCallback, convert_to_fp8
from octavo.hf.quantizer import OctavoConfig
from octavo.nn.frozen import FP8FrozenLinear

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, **_):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1].flatten(0, 1).float()
        return cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.1)


class OfHiddenStates(Trainer):
    def compute_loss(self, model, inputs, **_):
        output = model(**inputs, output_hidden_states=True)
        return output.loss + 0.1 * sum(states.float().square().mean() for states in output.hidden_states)


class OfEmbeddings(Trainer):
    def compute_loss(self, model, inputs, **_):
        embeddings = 1.5 * model.get_input_embeddings()(inputs.pop("input_ids"))
        return model(inputs_embeds=embeddings, **inputs).loss


class TwoForwards(Trainer):
    def compute_loss(self, model, inputs, **_):
        backwards = {name: value.flip(0) for name, value in inputs.items()}
        return model(**inputs).loss + 0.5 * model(**backwards).loss


class LastLogits(Trainer):
    def compute_loss(self, model, inputs, **_):
        labels = inputs.pop("labels")[:, -4:].flatten().clamp(min=0)
        return cross_entropy(model(**inputs, logits_to_keep=4).logits.flatten(0, 1).float(), labels)


CASES = {
    "padded": {},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "neftune": {"neftune_noise_alpha": 5},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "a loss of one's own": {"cls": OwnLoss},
    "hidden states": {"cls": OfHiddenStates},
    "embeddings": {"cls": OfEmbeddings},
    "two forwards": {"cls": TwoForwards},
    "the last logits": {"cls": LastLogits},
    "SGD": {"optim": "sgd", "learning_rate": 0.1},
    "clipping": {"max_grad_norm": 0.1},
}


def padded(pieces):
    width = max(len(piece["input_ids"]) for piece in pieces)

    def filled(name, value):
        return torch.stack([torch.nn.functional.pad(p[name], (0, width - len(p[name])), value=value) for p in pieces])

    return {name: filled(name, value) for name, value in {"input_ids": 0, "labels": -100, "attention_mask": 0}.items()}


def ragged():
    lengths = torch.randint(5, 24, (16,), generator=torch.Generator().manual_seed(5)).tolist()
    return [
        {name: ids[:n] for name, ids in row.items()} | {"attention_mask": torch.ones(n, dtype=torch.long)}
        for row, n in zip(rows(), lengths, strict=True)
    ]


def trained(model, folder, *, cls=Trainer, callbacks=(), **settings):
    """Losses, norms of gradients, and what has become of the weights that are trained."""
    arguments = TrainingArguments(str(folder), **SETTINGS | settings)
    torch.manual_seed(0)
    trainer = cls(model, arguments, data_collator=padded, train_dataset=ragged(), callbacks=list(callbacks))
    weights = [p for _, p in sorted(model.named_parameters()) if p.requires_grad]
    before = torch.cat([p.detach().flatten() for p in weights])
    trainer.train()
    change = torch.cat([p.detach().flatten() for p in weights]) - before
    return [entry["loss"] for entry in logs(trainer)], norms(trainer), change


def all_weights(_folder, in_fp8):
    model = build()
    if in_fp8:
        convert_to_fp8(model, FP8TrainingConfig.from_recipe("block", fp8_format="E4M3"))
    return model


def adapters(folder, in_fp8):
    """Adapters on a frozen base, or on plain weights with the very same values."""
    build().save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=OctavoConfig())
    if not in_fp8:
        plain = AutoModelForCausalLM.from_pretrained(folder)
        for name, module in model.named_modules():
            if isinstance(module, FP8FrozenLinear):
                plain.get_submodule(name).weight.data = module.dequantize(torch.float32)
        model = plain
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=LINEARS, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros would hide half of the gradients
            torch.nn.init.normal_(parameter, std=0.02)
    return model


@pytest.mark.parametrize("make", [all_weights, adapters])
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_updates_are_those_of_the_plain_model(case, make, tmp_path):
    expected = trained(make(tmp_path / "model", False), tmp_path, **CASES[case])
    actual = trained(make(tmp_path / "model", True), tmp_path, callbacks=[OctavoCallback()], **CASES[case])
    assert actual[0] == pytest.approx(expected[0], rel=0.01)
    assert actual[1] == pytest.approx(expected[1], rel=0.05)
    assert cosine_similarity(actual[2], expected[2], dim=0) > 0.95
