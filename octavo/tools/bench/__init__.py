"""`octavo bench`: a check of Octavo's numbers on the user's own device.

| file | what |
| --- | --- |
| `../shapes.py` | presets, shapes and FLOPs of models |
| `contenders.py` | who is timed, and why somebody is not |
| `prepared_model.py`, `others.py` | a model made ready for one contender, and its training step |
| `check.py` | correctness first: loss and gradient against BF16 |
| `worker.py`, `processes.py` | one contender in a process of its own, and the parent's end of it |
| `workload.py`, `workload_run.py`, `trainer_run.py` | batches of changing lengths, and a run through them |
| `request.py`, `runner.py` | a checked request, and its interleaved run |
| `rollout/` | `--mode rollout` and `--mode grpo` |
| `gemm.py`, `kernels.py`, `timing.py` | the parts: GEMMs, quantising, device time |
| `result.py`, `workload_result.py`, `show.py`, `plot.py`, `table.py` | figures, the file, terminal, picture, Markdown |
"""
