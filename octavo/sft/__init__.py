"""Supervised fine-tuning in one command, `octavo sft`, on TRL's `SFTTrainer`.

settings.py     one run as a frozen dataclass
sources.py      files, folders and datasets of the Hub to rows
examples.py     rows to tokens and labels
docstrings.py   the rows of a run without arguments; `small_model.py` has its model
memory.py       what `octavo plan` says of the run, before a model is loaded
model.py        the model, its adapters and its tokenizer
trainer.py      TRL's trainer, with figures for each step
run.py          all of it, and what a run leaves in its folder
"""
