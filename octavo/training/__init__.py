"""Training runs: data, settings, the loop and checkpoints; and `FP8Trainer`, the step, for loops of your own."""
