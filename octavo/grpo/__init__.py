"""`octavo grpo`: the model, the task, the engine, and what a run leaves."""
