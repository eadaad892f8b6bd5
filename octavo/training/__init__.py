"""Training runs: data, settings, the step, the loop, checkpoints; and `FP8Trainer` for a loop of your own."""
