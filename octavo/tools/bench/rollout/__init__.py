"""`octavo bench --mode rollout` and `--mode grpo`: generation against its floor, and whole steps of GRPO.

| file | what |
| --- | --- |
| `ways.py` | who generates, with which weights, cache and products |
| `floor.py` | the time that reading a rollout's bytes takes; `../../rollouts.py` has its sizes |
| `models.py`, `generators.py` | a model made ready for a way, and the four ways to complete prompts with it |
| `measure.py`, `gap.py` | tokens a second and memory; how far generation is from a full forward |
| `grpo_step.py` | rollout and update by `octavo.rl.grpo` |
| `profile.py` | kernels of one decode step |
| `worker.py`, `runner.py` | a way in a process of its own, and all of them in order |
| `result.py`, `show.py` | figures, the terminal, Markdown |
"""
