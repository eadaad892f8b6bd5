"""`octavo bench`: the user's own check of Octavo's numbers.

| file | what |
| --- | --- |
| `cases.py` | what is timed: presets, shapes, FLOPs |
| `contenders.py` | who is timed, and why somebody is not |
| `subject.py`, `peers.py` | a model made ready for one contender, and its training step |
| `check.py` | correctness first: loss and gradient against BF16 |
| `worker.py`, `processes.py` | one contender in a process of its own, and the parent's end of it |
| `runner.py` | the interleaved run |
| `gemm.py`, `kernels.py`, `timing.py` | the parts: GEMMs, quantising, device time |
| `result.py`, `show.py`, `plot.py`, `table.py` | figures, the file, the terminal, the picture, Markdown tables |
"""
