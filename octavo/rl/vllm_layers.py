"""vLLM's layers, computed by the trainer's own modules: its two public registrations.

    register_quantization_config    every linear of vLLM gets a method that owns no weight, and whose `apply` calls the
                                    trainer's linears, adapters included
    register_model_loader           norms take the trainer's Parameters; embedding and head call the trainer's

vLLM names a layer as the trainer does, but for q, k, v and gate, up, which it has as one; `packed_modules_mapping`, of
vLLM's model, says which. So whatever the trainer's modules are now is what vLLM computes: there is nothing to send
after an optimiser step, and nothing that vLLM could lay out, round or pad in another way.

A linear is found by its name in every call, because PEFT puts adapters around it when it likes. This file imports vLLM,
and so is imported only when an engine starts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from octavo.decoders.products import linear_group
from octavo.rl.policy import Policy

METHOD = "octavo_shared"  # of the quantisation, and of the loader
_POLICY: ContextVar[Policy] = ContextVar("octavo_vllm_policy")


@contextmanager
def sharing(policy: Policy) -> Iterator[None]:
    """Have the engine that is built meanwhile compute with this model's modules: vLLM passes names, no objects."""
    token = _POLICY.set(policy)
    try:
        yield
    finally:
        _POLICY.reset(token)


@register_quantization_config(METHOD)
class SharedConfig(QuantizationConfig):
    """The "quantisation" of a model whose weights are the trainer's."""

    def __init__(self) -> None:
        super().__init__()
        self.trainer = _POLICY.get().model

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SharedConfig":  # noqa: ARG003
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None  # embedding and head are taken over by the loader: some models give them no configuration
        parent, _, name = prefix.rpartition(".")
        return SharedLinears(self.trainer, parent, self.packed_modules_mapping.get(name, [name]))


class SharedLinears(LinearMethodBase):
    """The product of one of vLLM's linears, by those of the trainer: `names` in its module `parent`."""

    def __init__(self, trainer: nn.Module, parent: str, names: list[str]) -> None:
        self.trainer, self.parent, self.names = trainer, parent, names

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Make nothing: the weights are the trainer's."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: ARG002
        parent = self.trainer.get_submodule(self.parent)
        members: list[Any] = [getattr(parent, name) for name in self.names]
        if len(members) == 1:
            output: Tensor = members[0](x)
            return output
        joined = linear_group(members, x)
        return torch.cat([member(x) for member in members], dim=-1) if joined is None else joined


class SharedEmbeddings(QuantizeMethodBase):
    """Embedding and head by the trainer's: any vocabulary as it is, where vLLM's own are padded to a multiple of 64."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Make nothing: the weights are the trainer's."""

    def embedding(self, layer: nn.Module, ids: Tensor) -> Tensor:  # noqa: ARG002
        # Not the module itself, which may scale what it looks up, as vLLM does on its own.
        return nn.functional.embedding(ids, self.policy.model.get_input_embeddings().weight)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return self.policy.logits(x)


@register_model_loader(METHOD)
class SharedLoader(BaseModelLoader):
    """Gives a model of vLLM the trainer's Parameters, by their names."""

    def download_model(self, model_config: Any) -> None:
        """Get nothing: the model is here."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:  # noqa: ARG002
        policy = _POLICY.get()
        embeddings = SharedEmbeddings(policy)
        for module in list(model.modules()):
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method = embeddings
            if isinstance(module, VocabParallelEmbedding | LinearBase):
                for key, _ in list(module.named_parameters(recurse=False)):
                    module.register_parameter(key, None)  # padded embeddings, and biases that the trainer adds
        share_norms(model, policy.model)


def share_norms(model: nn.Module, trainer: nn.Module) -> None:
    """Give all that a model of vLLM has Parameters of, which is norms, those of the trainer's modules."""
    for name, module in model.named_modules():
        _share(name, module, trainer)


def logits_processor(model: nn.Module) -> LogitsProcessor:
    """Return the module of a model of vLLM that bends and scales its logits. It only scales them from here on."""
    found: LogitsProcessor = next(module for module in model.modules() if isinstance(module, LogitsProcessor))
    found.soft_cap = None  # `Policy.logits` has bent them
    return found


def _share(name: str, module: nn.Module, trainer: nn.Module) -> None:
    """Put the trainer's Parameters, by name, in the place of a module's own."""
    for key, own in module.named_parameters(recurse=False):
        full = f"{name}.{key}".lstrip(".")
        try:
            theirs = trainer.get_parameter(full)
        except AttributeError as error:
            raise ValueError(
                f"vLLM's {type(module).__name__} has a Parameter {full} that the trainer's {type(trainer).__name__} "
                "does not have under that name: engine='native' generates with this model"
            ) from error
        if theirs.shape != own.shape:
            raise ValueError(f"{full}: {tuple(own.shape)} in vLLM, {tuple(theirs.shape)} in the trainer")
        module.register_parameter(key, theirs)
