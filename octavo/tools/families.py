"""The kinds of models that the tools know, and what the bench and the plan do differently for each.

`Family` describes Hugging Face decoders; a family of another kind overrides what differs. `family_of` finds it by the
`model_type` of a configuration, so that no tool has to ask what kind of model it has before it.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from octavo.numerics import FP8ScalingManager, FP8TrainingConfig

if TYPE_CHECKING:  # these use this
    from octavo.optim.step_memory import StepMemory
    from octavo.tools.bench.contenders import Contender
    from octavo.tools.plan.gpus import Gpu
    from octavo.tools.plan.options import Option
    from octavo.tools.plan.request import Request
    from octavo.tools.plan.timeline import Memory
    from octavo.tools.shapes import Case, Linear

_OTHERS = {"bdh": "octavo.tools.bdh.family"}  # model_type → the module whose FAMILY describes it


@cache
def family_of(model_type: str | None) -> "Family":
    """Return the family of a `model_type`: Hugging Face decoders, unless another is known by that name."""
    if model_type not in _OTHERS:
        return Family()
    family: Family = import_module(_OTHERS[model_type]).FAMILY
    return family


class Family:
    """Hugging Face decoders."""

    predicts = "token"
    # Each layer is a module, compiled by itself; else the model is compiled as a whole.
    compiles_layers = True
    # Plan: codes to advise on a GPU with FP8 and on one without, the first of each in the short table as well; bytes of
    # a weight in those; whether to look for the longest sequence that fits.
    advised: Mapping[bool, tuple[str, ...]] = {True: ("fp8",), False: ("own",)}
    weight_bytes = 2
    plans_sequences = True

    # Shapes

    def depth(self, config: Mapping[str, Any]) -> int:
        """Return the number of layers that a configuration has."""
        return int(config["num_hidden_layers"])

    def vocabulary(self, config: Mapping[str, Any]) -> int:
        """Return the number of different tokens."""
        return int(config["vocab_size"])

    def linears(self, case: "Case") -> list["Linear"]:
        """Return every product with a weight. q/k/v and gate/up are one each, as they share their input."""
        from octavo.tools.shapes import Linear

        config, head_dim = case.config, case.head_dim
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        return [
            Linear("qkv", (heads + 2 * kv_heads) * head_dim, hidden, case.layers),
            Linear("o", hidden, heads * head_dim, case.layers),
            Linear("gate_up", 2 * intermediate, hidden, case.layers),
            Linear("down", hidden, intermediate, case.layers),
            Linear("head", config["vocab_size"], hidden, 1),
        ]

    def parameters(self, case: "Case") -> int:
        """Return the number of trained values, norms and biases apart. The embedding is as large as the head."""
        return sum(linear.parameters * (2 if linear.name == "head" else 1) for linear in case.linears)

    def attention_flops(self, case: "Case") -> int:
        """Return the FLOPs of causal attention in a step: q·kᵀ and p·v, forward and backward."""
        return 6 * case.seq * case.tokens * int(case.config["num_attention_heads"]) * case.head_dim * case.layers

    def attention_gemm_flops(self, case: "Case") -> int:  # noqa: ARG002
        """Return the part of `attention_flops` that is GEMMs which could run in FP8."""
        return 0

    def check_mode(self, mode: str) -> None:
        """Refuse a mode that these models cannot be trained in."""

    # Bench

    def check_head(self, case: "Case", head: str) -> None:
        """Refuse a precision that the head cannot have."""

    def check_workload(self, workload: str) -> None:
        """Refuse a workload that these models cannot be given."""

    def check_extras(self, item: str, case: "Case") -> None:
        """Refuse a recipe with extras, such as `block+fp8-head`, where they do not apply."""

    def contenders(self, recipe: str, head: str, wgrad: str, compile: bool) -> list["Contender"]:
        """Return Octavo's own ways to run the model in a recipe."""
        from octavo.tools.bench.contenders import decoder_contenders

        return decoder_contenders(recipe, head, wgrad, compile)

    def why_not(self, name: str, is_package: bool) -> str:  # noqa: ARG002
        """Return why a contender cannot run these models; empty if it can."""
        return ""

    def build(self, case: "Case") -> nn.Module:
        """Return a model with the shape of the case."""
        from octavo.tools.bench.random_model import build_causal_lm

        model = build_causal_lm(case.config, layers=case.layers, positions=case.seq, device=case.device)
        weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        if weights != case.matmul_parameters:
            raise ValueError(
                f"{case.name}: its linears hold {weights:,} weights, the bench's formula for a dense decoder says "
                f"{case.matmul_parameters:,}: TFLOP/s would be wrong; use a Llama-like configuration"
            )
        return model

    def convert(
        self,
        model: nn.Module,
        kind: str,  # noqa: ARG002
        config: FP8TrainingConfig,
        tokens: int,
    ) -> tuple[AbstractContextManager[Any], FP8ScalingManager | None, str]:
        """Run the model in FP8. Returns the context that its steps run in, its scales, and a summary."""
        from octavo.convert import convert_to_fp8

        report = convert_to_fp8(model, config, precision="fp8", tokens=tokens)
        return nullcontext(), report.scaling, report.summary()

    def loss(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of predicting each label from the tokens before it."""
        loss: Tensor = model(**inputs, use_cache=False).loss
        return loss

    # Plan

    def check_request(self, request: "Request") -> None:
        """Refuse a request that makes no sense for these models."""

    def check_config(self, model: str, config: Mapping[str, Any]) -> None:
        """Refuse a configuration that the plan does not cover."""
        from octavo.tools.plan.request import check_decoder

        check_decoder(model, config)

    def options(
        self, case: "Case", *, compiled: bool, fp8_head: bool, offload: str | None, gpu: "Gpu | None"
    ) -> list["Option"]:
        """Return the ways to train that the plan compares, on this GPU if there is one."""
        from octavo.tools.plan.options import options_of

        return options_of(case, compiled=compiled, fp8_head=fp8_head, offload=offload, gpu=gpu)

    def memory(self, case: "Case", option: "Option") -> "Memory":
        """Return the memory that a training step takes."""
        from octavo.tools.plan.memory import plan_decoder

        return plan_decoder(case, option)

    def trained_values(self, case: "Case") -> int:
        """Return the number of the model's values, norms included, biases and adapters apart."""
        from octavo.tools.plan.persistent import decoder_parameters

        return decoder_parameters(case)

    def describe(self, case: "Case") -> tuple[str, str]:
        """Return, in words, the number of parameters and the kind of training."""
        what = f"LoRA of rank {case.rank} on {case.targets} linears" if case.frozen else "full fine-tuning"
        return f"{self.trained_values(case) / 1e9:.2f} billion", what

    def code(self, model: str, case: "Case", option: "Option") -> str:
        """Return the code that trains as the option says."""
        from octavo.tools.plan.advice import decoder_code

        return decoder_code(model, case, option)

    def bench_command(self, model: str, case: "Case", option: "Option", gpu: "Gpu") -> str:
        """Return the command that measures the option; empty if the bench does not have it."""
        from octavo.tools.plan.advice import decoder_bench

        return decoder_bench(model, case, option, gpu)

    def notes(self, case: "Case", gpu: "Gpu | None") -> list[str]:
        """Return remarks on this model that the figures alone do not make."""
        from octavo.tools.plan.options import why_bf16_products

        reason = why_bf16_products(case, gpu) if case.frozen else ""
        return [f"FP8 weights: products in BF16, since {reason}; fp8_products=True insists on FP8."] if reason else []

    def background(self, case: "Case", memories: Sequence["Memory"]) -> list[str]:
        """Return how to read the table of all options."""
        from octavo.tools.plan.advice import decoder_background

        return decoder_background(case, memories)

    def planned_run(self, config: Mapping[str, Any]) -> "StepMemory | None":  # noqa: ARG002
        """Return the plan for a run of `octavo train`, from its `config.json`; None where there is none."""
        return None
