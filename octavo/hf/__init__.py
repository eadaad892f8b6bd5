"""Octavo within Hugging Face's libraries: loading into FP8, adapters, export, the Trainer, Accelerate and TRL."""
