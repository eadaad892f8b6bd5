"""Octavo trains PyTorch models in FP8.

    import octavo

    report = octavo.convert_to_fp8(model)                   # linears in FP8, in place; print the report
    context = octavo.fp8_autocast()                         # or, for models that multiply raw parameters:
    with context:
        loss = model(batch)

`octavo.numerics` says what FP8 means, `octavo.nn` has the layers, `octavo train` is a job to start with.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.convert import ConversionReport, convert_to_fp8, restore
from octavo.nn.autocast import FP8Autocast, fp8_autocast, get_fp8_autocast_context
from octavo.nn.functional import fp8_linear, fp8_matmul
from octavo.nn.linear import FP8Linear
from octavo.numerics import (
    E4M3,
    E4M3_FNUZ,
    E5M2,
    E5M2_FNUZ,
    FP8ScalingManager,
    FP8TrainingConfig,
    Quantized,
    compute_scale,
    dequantize,
    quantize,
    quantize_stochastic,
)
from octavo.optim.memory import measure_memory
from octavo.support import FP8Support, check_fp8_support
from octavo.training.trainer import FP8Trainer

if TYPE_CHECKING:  # see the end
    from octavo.fast import FastLanguageModel as FastLanguageModel
    from octavo.hf.accelerate import setup_fp8_mixed_precision_training as setup_fp8_mixed_precision_training
    from octavo.hf.accelerate import watch_environment as watch_environment
    from octavo.hf.callback import OctavoCallback as OctavoCallback
    from octavo.hf.export import export_fp8 as export_fp8
    from octavo.hf.graphs import use_cuda_graphs as use_cuda_graphs
    from octavo.hf.quantizer import OctavoConfig as OctavoConfig

__version__ = "0.1.0"

__all__ = [
    "E4M3",
    "E4M3_FNUZ",
    "E5M2",
    "E5M2_FNUZ",
    "ConversionReport",
    "FP8Autocast",
    "FP8Linear",
    "FP8ScalingManager",
    "FP8Support",
    "FP8Trainer",
    "FP8TrainingConfig",
    "Quantized",
    "check_fp8_support",
    "compute_scale",
    "convert_to_fp8",
    "dequantize",
    "fp8_autocast",
    "fp8_linear",
    "fp8_matmul",
    "get_fp8_autocast_context",
    "measure_memory",
    "quantize",
    "quantize_stochastic",
    "restore",
]

# Imported when first asked for, and so not in `__all__`: `import octavo` needs neither transformers nor accelerate.
_LATER = {
    "FastLanguageModel": "octavo.fast",
    "OctavoCallback": "octavo.hf.callback",
    "OctavoConfig": "octavo.hf.quantizer",
    "export_fp8": "octavo.hf.export",
    "setup_fp8_mixed_precision_training": "octavo.hf.accelerate",
    "use_cuda_graphs": "octavo.hf.graphs",
    "watch_environment": "octavo.hf.accelerate",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


def __getattr__(name: str) -> Any:
    if name in _LATER:
        try:
            return getattr(import_module(_LATER[name]), name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"octavo.{name} needs {error.name}: pip install 'octavo[hf]'") from error
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
