"""BDH in the tools: its shapes, the codes that a plan compares, and, in `family.py`, how to build, time and plan it.

family.py     what the bench and the plan do differently for BDH
plan.py       the memory of its training steps, and of runs of `octavo train`
simulate.py   a step on tensors without contents, from which the plan takes its figures
"""

from octavo.models.bdh import PRESETS

SHAPES = {f"bdh-{size}": {"model_type": "bdh", "vocabulary": 256, **shape} for size, shape in PRESETS.items()}
# The model plain, under torch's autocast, under Octavo's, and with its fused layers.
CODES = {"bdh-fp32": "FP32", "bdh-bf16": "BF16 autocast", "bdh-fp8": "FP8 autocast", "bdh-fused": "FP8 fused"}
