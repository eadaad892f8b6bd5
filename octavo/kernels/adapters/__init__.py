"""Low-rank adapters (LoRA) beside a linear: what they add to its output, and their gradients."""
