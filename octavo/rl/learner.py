"""The model as GRPO trains it: log-probabilities of packed completions, with its adapters or without."""

from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from octavo.decoders.backbone import hidden_states
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.linear import LinearInFP8
from octavo.rl.batches import MicroBatch
from octavo.rl.loss import token_logprobs


def leave_dropout_out(model: nn.Module) -> None:
    """Have a model drop nothing: a rollout does not, and ratios of probabilities are to be of one model."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if getattr(module, "attention_dropout", 0.0):
            module.attention_dropout = 0.0


class Learner:
    """A causal language model, with PEFT's adapters around it or trained as a whole."""

    def __init__(self, model: Any) -> None:
        leave_dropout_out(model)
        self.model = model
        self.is_adapted = isinstance(model, PeftModel)
        self.causal = model.get_base_model() if self.is_adapted else model
        head = getattr(self.causal, "lm_head", None)
        if type(head) is not nn.Linear or head.bias is not None:
            raise ValueError(
                f"{type(self.causal).__name__}: its head is no plain linear without bias; leave lm_head out of the "
                "adapters' targets"
            )
        text = self.causal.config.get_text_config()
        if getattr(text, "final_logit_softcapping", None) is not None:
            raise ValueError(f"{type(self.causal).__name__}: final_logit_softcapping bends its logits; not supported")
        if any(module.granularity == "tensor" for module in model.modules() if isinstance(module, FP8FrozenLinear)):
            raise ValueError(
                "load_in_fp8='tensor': inputs then have one scale for a whole batch, and a token's probability depends "
                "on its batch-mates; load the model with 'channel' or 'block'"
            )
        self.head: nn.Linear = head
        self.positions: int | None = getattr(text, "max_position_embeddings", None)
        self.parameters: list[nn.Parameter] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise ValueError("none of the model's weights is trained: add adapters (FastLanguageModel.get_peft_model)")

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def vocabulary(self) -> int:
        """Tokens that the model has embeddings for."""
        rows: int = self.causal.get_input_embeddings().weight.shape[0]
        return rows

    def logprobs(self, batch: MicroBatch, temperature: float) -> Tensor:
        """Return log-probabilities `[N]` of the tokens of completions."""
        kwargs = {"input_ids": batch.ids, "position_ids": batch.positions}
        hidden, _, _ = hidden_states(self.causal, kwargs, batch.ids)
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.index)
        return token_logprobs(chosen, self.head.weight, batch.targets, temperature)

    @torch.no_grad()
    def reference(self, batch: MicroBatch, temperature: float) -> Tensor:
        """Return the same without adapters, that is, by the model that training started from."""
        if not self.is_adapted:
            raise ValueError("beta > 0 with all weights trained: the reference would be a second copy; set beta=0")
        with self.model.disable_adapter():
            return self.logprobs(batch, temperature)

    @property
    def in_fp8(self) -> bool:
        return any(isinstance(module, LinearInFP8) for module in self.model.modules())
