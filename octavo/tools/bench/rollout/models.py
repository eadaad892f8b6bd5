"""A model made ready for a way: random weights from the seed, made on the device; LoRA with values beside them."""

from dataclasses import replace
from typing import Any

from octavo.decoders.fuse import fuse_loaded
from octavo.tools.bench.contenders import Contender
from octavo.tools.bench.prepared_model import PreparedModel
from octavo.tools.bench.rollout.ways import Way
from octavo.tools.shapes import Case


class _Loaded(PreparedModel):
    """A model as `FastLanguageModel` loads it: one in BF16 is fused as far as weights in BF16 can be."""

    def _prepare(self, contender: Contender) -> None:
        if contender.kind == "octavo-bf16":
            self.summary = "; ".join(fuse_loaded(self.model).fused) or "BF16, nothing fused"
        else:
            super()._prepare(contender)


def prepare(case: Case, way: Way) -> PreparedModel:
    """Return the model of a way. Transformers' own have no adapters, and nothing of Octavo's."""
    if not way.is_native:
        return PreparedModel(replace(case, frozen=False, rank=0), Contender(way.name, "bf16", compile=False))
    if way.recipe is None:
        return _Loaded(case, Contender(way.name, "octavo-bf16", compile=False))
    return _Loaded(case, Contender(way.name, "octavo", compile=False, recipe=way.recipe))


def causal_of(model: Any) -> Any:
    """Return the causal language model inside PEFT's wrapper, if there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
