"""BDH in the bench and in the plan: raw parameters in place of linears, and weights that all layers share."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from octavo.models.bdh import BDH, BDHConfig, fuse
from octavo.nn.autocast import fp8_autocast
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.optim.step_memory import StepMemory
from octavo.tools.bdh import plan
from octavo.tools.bench.contenders import OWN_BASELINE, Contender
from octavo.tools.families import Family
from octavo.tools.plan.gpus import Gpu
from octavo.tools.plan.options import OFFLOADS, Option
from octavo.tools.plan.persistent import FP32
from octavo.tools.plan.request import Request
from octavo.tools.plan.timeline import Memory
from octavo.tools.shapes import Case, Linear
from octavo.training.errors import UserError

FUSED = "octavo-fused"


class _BDHFamily(Family):
    predicts = "byte"
    compiles_layers = False  # its loop over the layers is one graph
    advised: Mapping[bool, tuple[str, ...]] = {True: ("bdh-fused",), False: ("bdh-bf16",)}
    weight_bytes = FP32
    plans_sequences = False  # each length would be another step to simulate

    def depth(self, config: Mapping[str, Any]) -> int:
        return int(config["layers"])

    def vocabulary(self, config: Mapping[str, Any]) -> int:
        return int(config["vocabulary"])

    def linears(self, case: Case) -> list[Linear]:
        d, h, n = case.config["dim"], case.config["heads"], case.config["neurons"]
        return [
            Linear("encoder", h * n, d, case.layers),
            Linear("encoder_v", n, d, h * case.layers),
            Linear("decoder", d, h * n, case.layers),
            Linear("head", case.vocabulary, d, 1),
        ]

    def parameters(self, case: Case) -> int:
        return BDHConfig(**_shape(case), layers=case.layers).parameter_count

    def attention_flops(self, case: Case) -> int:
        width = int(case.config["heads"] * (case.config["neurons"] + case.config["dim"]))
        return 3 * case.seq * case.tokens * width * case.layers

    def attention_gemm_flops(self, case: Case) -> int:
        return self.attention_flops(case)  # it has no softmax: all of it is GEMMs

    def check_mode(self, mode: str) -> None:
        if mode == "lora":
            raise UserError("--mode lora: BDH has no nn.Linear to put adapters on; use --mode full")

    def check_head(self, case: Case, head: str) -> None:
        if head != "bf16":
            raise UserError(f"--head {head}: BDH's head of {case.vocabulary} bytes stays in BF16; leave it out")

    def check_workload(self, workload: str) -> None:
        raise UserError(f"--workload {workload}: BDH has no attention mask, so no padding; leave it out")

    def check_extras(self, item: str, case: Case) -> None:
        name = item.split("+")[0]
        raise UserError(f"--recipe {item}: what follows a + is for decoders; for {case.name} use --recipe {name}")

    def contenders(self, recipe: str, head: str, wgrad: str, compile: bool) -> list[Contender]:  # noqa: ARG002
        plain = Contender(f"octavo {recipe}", "octavo", compile, recipe)
        return [plain, Contender(f"octavo {recipe} fused", FUSED, False, recipe)]

    def why_not(self, name: str, is_package: bool) -> str:
        if is_package:
            return "BDH has no nn.Linear to convert"
        return "BDH's fused code is FP8 only" if name == OWN_BASELINE else ""

    def build(self, case: Case) -> nn.Module:
        with torch.device(case.device):
            return BDH(BDHConfig(**_shape(case), layers=case.layers)).to(torch.bfloat16)

    def convert(
        self,
        model: Any,
        kind: str,
        config: FP8TrainingConfig,
        tokens: int,  # noqa: ARG002
    ) -> tuple[AbstractContextManager[Any], FP8ScalingManager | None, str]:
        if kind == FUSED:
            return nullcontext(), fuse(model, config).scaling, "BDH's fused FP8 code"
        context = fp8_autocast(config, model=model)
        return context, context.scaling, "BDH's own code under fp8_autocast"

    def loss(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = model(inputs["input_ids"], inputs["labels"])[1]
        return loss

    def check_request(self, request: Request) -> None:
        self.check_mode(request.mode)
        if request.offload in OFFLOADS:
            raise UserError(
                f"--offload {request.offload}: is planned for decoders alone; leave it out for {request.model}"
            )
        if request.head != "bf16":
            raise UserError(f"--head {request.head}: BDH's head of bytes stays in BF16; leave it out")

    def check_config(self, model: str, config: Mapping[str, Any]) -> None:
        """Accept it: every BDH comes from a preset."""

    def options(
        self,
        case: Case,  # noqa: ARG002
        *,
        compiled: bool,  # noqa: ARG002
        fp8_head: bool,  # noqa: ARG002
        offload: str | None,  # noqa: ARG002
        gpu: Gpu | None,  # noqa: ARG002
    ) -> list[Option]:
        return plan.bdh_options()

    def memory(self, case: Case, option: Option) -> Memory:
        return plan.plan_bdh(case, option)

    def trained_values(self, case: Case) -> int:
        return self.parameters(case)

    def describe(self, case: Case) -> tuple[str, str]:
        return f"{self.parameters(case) / 1e6:.0f} million", "training"

    def code(self, model: str, case: Case, option: Option) -> str:
        return plan.bdh_code(model, case, option)

    def bench_command(self, model: str, case: Case, option: Option, gpu: Gpu) -> str:  # noqa: ARG002
        return ""

    def notes(self, case: Case, gpu: Gpu | None) -> list[str]:  # noqa: ARG002
        return []

    def background(self, case: Case, memories: Sequence[Memory]) -> list[str]:  # noqa: ARG002
        return [plan.NOTE]

    def planned_run(self, config: Mapping[str, Any]) -> StepMemory | None:
        return plan.planned_run(config)


def _shape(case: Case) -> dict[str, int]:
    return {name: case.config[name] for name in ("dim", "heads", "neurons", "vocabulary")}


FAMILY = _BDHFamily()
