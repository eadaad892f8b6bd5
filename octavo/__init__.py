"""Octavo trains PyTorch models in FP8.

    import octavo

    report = octavo.convert_to_fp8(model)                   # linears in FP8, in place; print the report
    context = octavo.fp8_autocast()                         # or, for models that multiply raw parameters:
    with context:
        loss = model(batch)

`octavo.numerics` says what FP8 means, `octavo.nn` has the layers, `octavo train` is a job to start with.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # see the end
    from octavo.convert import ConversionReport as ConversionReport
    from octavo.convert import convert_to_fp8 as convert_to_fp8
    from octavo.convert import restore as restore
    from octavo.decoders.graphs import use_cuda_graphs as use_cuda_graphs
    from octavo.dist.amax import share_amax as share_amax
    from octavo.dist.gather import fp8_all_gather as fp8_all_gather
    from octavo.dist.reduce import reduce_gradients as reduce_gradients
    from octavo.hf.accelerate import setup_fp8_mixed_precision_training as setup_fp8_mixed_precision_training
    from octavo.hf.accelerate import watch_environment as watch_environment
    from octavo.hf.callback import OctavoCallback as OctavoCallback
    from octavo.hf.export import export_fp8 as export_fp8
    from octavo.hf.quantizer import OctavoConfig as OctavoConfig
    from octavo.nn.autocast import FP8Autocast as FP8Autocast
    from octavo.nn.autocast import fp8_autocast as fp8_autocast
    from octavo.nn.autocast import get_fp8_autocast_context as get_fp8_autocast_context
    from octavo.nn.functional import fp8_linear as fp8_linear
    from octavo.nn.functional import fp8_matmul as fp8_matmul
    from octavo.nn.linear import FP8Linear as FP8Linear
    from octavo.numerics import E4M3 as E4M3
    from octavo.numerics import E4M3_FNUZ as E4M3_FNUZ
    from octavo.numerics import E5M2 as E5M2
    from octavo.numerics import E5M2_FNUZ as E5M2_FNUZ
    from octavo.numerics import FP8ScalingManager as FP8ScalingManager
    from octavo.numerics import FP8TrainingConfig as FP8TrainingConfig
    from octavo.numerics import Quantized as Quantized
    from octavo.numerics import compute_scale as compute_scale
    from octavo.numerics import dequantize as dequantize
    from octavo.numerics import quantize as quantize
    from octavo.numerics import quantize_stochastic as quantize_stochastic
    from octavo.optim.step_memory import measure_memory as measure_memory
    from octavo.rl.fast import FastLanguageModel as FastLanguageModel
    from octavo.support import FP8Support as FP8Support
    from octavo.support import check_fp8_support as check_fp8_support
    from octavo.training.trainer import FP8Trainer as FP8Trainer

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
    "fp8_all_gather",
    "fp8_autocast",
    "fp8_linear",
    "fp8_matmul",
    "fp8_sequence_gather",
    "get_fp8_autocast_context",
    "measure_memory",
    "quantize",
    "quantize_stochastic",
    "reduce_gradients",
    "restore",
    "share_amax",
]

# Imported when first asked for: torch takes seconds, and the `octavo` command should say what it can do before that.
_WHERE = {
    "ConversionReport": "octavo.convert",
    "E4M3": "octavo.numerics",
    "E4M3_FNUZ": "octavo.numerics",
    "E5M2": "octavo.numerics",
    "E5M2_FNUZ": "octavo.numerics",
    "FP8Autocast": "octavo.nn.autocast",
    "FP8Linear": "octavo.nn.linear",
    "FP8ScalingManager": "octavo.numerics",
    "FP8Support": "octavo.support",
    "FP8Trainer": "octavo.training.trainer",
    "FP8TrainingConfig": "octavo.numerics",
    "Quantized": "octavo.numerics",
    "check_fp8_support": "octavo.support",
    "compute_scale": "octavo.numerics",
    "convert_to_fp8": "octavo.convert",
    "dequantize": "octavo.numerics",
    "fp8_all_gather": "octavo.dist.gather",
    "fp8_autocast": "octavo.nn.autocast",
    "fp8_linear": "octavo.nn.functional",
    "fp8_matmul": "octavo.nn.functional",
    "fp8_sequence_gather": "octavo.dist.parallel",
    "get_fp8_autocast_context": "octavo.nn.autocast",
    "measure_memory": "octavo.optim.step_memory",
    "quantize": "octavo.numerics",
    "quantize_stochastic": "octavo.numerics",
    "reduce_gradients": "octavo.dist.reduce",
    "restore": "octavo.convert",
    "share_amax": "octavo.dist.amax",
}
# Not in `__all__`: these need transformers, accelerate or peft.
_LATER = {
    "FastLanguageModel": "octavo.rl.fast",
    "OctavoCallback": "octavo.hf.callback",
    "OctavoConfig": "octavo.hf.quantizer",
    "export_fp8": "octavo.hf.export",
    "setup_fp8_mixed_precision_training": "octavo.hf.accelerate",
    "use_cuda_graphs": "octavo.decoders.graphs",
    "watch_environment": "octavo.hf.accelerate",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        globals()[name] = value = getattr(import_module(_WHERE[name]), name)
        return value
    if name in _LATER:
        try:
            return getattr(import_module(_LATER[name]), name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"octavo.{name} needs {error.name}: pip install 'octavo[hf]'") from error
    if not name.startswith("_") and find_spec(f"octavo.{name}") is not None:
        return import_module(f"octavo.{name}")  # `octavo.numerics` after `import octavo` alone
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_LATER})
