"""BDH, whole: the model, and its layers in FP8 from the equations down to the kernels.

    model.py     the model, from its equations; nothing about FP8 in it
    fused.py     `fuse(model)` and `unfuse(model)`: the same module with its layers in FP8
    layer.py     one fused layer as an autograd function
    ops.py       the element-wise work between its products, as operators: by the specification or by a kernel
    spec.py      the specification of that work, in plain PyTorch
    kernels/     the Triton kernels that compute the same

Nothing outside `octavo/models`, `octavo/training` and `octavo/tools` imports this folder.
"""

from octavo.models.bdh.fused import FusedBDH, fuse, fused_layers, is_fused, unfuse, why_not_fused
from octavo.models.bdh.model import BDH, PRESETS, BDHConfig, rope, rope_angles

__all__ = [
    "BDH",
    "PRESETS",
    "BDHConfig",
    "FusedBDH",
    "fuse",
    "fused_layers",
    "is_fused",
    "rope",
    "rope_angles",
    "unfuse",
    "why_not_fused",
]
