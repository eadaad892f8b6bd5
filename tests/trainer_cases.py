"""Tiny runs in the Trainer of transformers and in TRL's SFTTrainer: nothing to download."""

import inspect
from pathlib import Path

import pytest
import torch
from decoder_cases import build

from octavo import OctavoCallback, convert_to_fp8

transformers = pytest.importorskip("transformers")

BYTES = 258  # of every byte one, padding and the end of a text
SETTINGS = {
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


def rows(count=16, length=24):
    ids = torch.randint(1, 160, (count, length), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def converted(config=None, *, precision="fp8", **changes):
    model = build(**changes)
    convert_to_fp8(model, config, precision=precision)
    return model


def trainer(folder, model=None, callbacks=None, optimizers=(None, None), **settings):
    """The stock Trainer, with OctavoCallback unless other callbacks are given."""
    return transformers.Trainer(
        converted() if model is None else model,
        transformers.TrainingArguments(output_dir=str(folder), **SETTINGS | settings),
        train_dataset=rows(),
        eval_dataset=rows(8),
        callbacks=[OctavoCallback()] if callbacks is None else callbacks,
        optimizers=optimizers,
    )


def sft_trainer(folder, model=None, callbacks=None, **settings):
    """TRL's stock SFTTrainer on short pieces of the standard library's source, a byte a token."""
    trl = pytest.importorskip("trl")
    settings = SETTINGS | {"max_steps": 3, "max_length": 64, "gradient_checkpointing": False} | settings
    return trl.SFTTrainer(
        converted(vocab_size=BYTES) if model is None else model,
        trl.SFTConfig(output_dir=str(folder), **settings),
        train_dataset=texts(),
        processing_class=byte_tokenizer(),
        callbacks=[OctavoCallback()] if callbacks is None else callbacks,
    )


def texts():
    from datasets import Dataset

    text = Path(inspect.getfile(inspect)).read_text()
    return Dataset.from_dict({"text": [piece for piece in text.split("\n\n") if 20 < len(piece) < 60][:32]})


def byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def logs(trainer):
    """The training logs."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def norms(trainer):
    """The norms of all gradients, of a trainer that has trained: they show at once what losses show much later."""
    return [entry["grad_norm"] for entry in logs(trainer)]


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in logs(trainer)]
