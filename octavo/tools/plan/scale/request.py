"""Request for a plan on several GPUs, checked here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from octavo.kernels.tuning import HOPPER, tuning_of
from octavo.numerics.checks import check_choice
from octavo.tools.plan.gpus import Gpu, find_gpu
from octavo.tools.plan.request import Request
from octavo.tools.plan.scale.assumptions import NCCL_GIB, Assumptions
from octavo.tools.plan.scale.ways import Way, ways_of
from octavo.tools.plan.timeline import GIB
from octavo.tools.shapes import Case
from octavo.training.errors import UserError

GPUS = (8, 64, 512)
STRATEGY = "fsdp2"
CHECKPOINTING = ("none", "layers")


@dataclass(frozen=True)
class ScaleRequest:
    """Request for a plan, with the options of `octavo plan --gpus`.

    `batch`: sequences of each GPU in a step. `checkpointing`: None takes it where a way does not fit without. `gpu`:
    its name or GiB; times are those of Hopper unless `assumed` has rates.
    """

    model: str
    gpus: Sequence[int] = GPUS
    strategy: str = STRATEGY
    mode: str = "full"
    batch: int = 4
    seq: int | None = None
    layers: int | None = None
    rank: int | None = None
    targets: str | None = None
    recipe: str | None = None
    checkpointing: str | None = None
    gpu: str = "h200"
    assumed: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        for gpus in self.gpus:
            if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
                raise UserError(f"--gpus {gpus}: a whole number of at least 1")
        if not self.gpus:
            raise UserError("--gpus: at least one number of GPUs")
        if self.checkpointing is not None:
            check_choice("checkpointing", self.checkpointing, CHECKPOINTING)
        if self.case.family.predicts != "token":
            raise UserError(f"MODEL {self.model}: several GPUs are planned for Hugging Face decoders; leave --gpus out")
        ways_of(self.case, self.strategy, self.recipe)
        gpu = self.device
        if not gpu.has_fp8:
            raise UserError(f"--gpu {self.gpu}: has no FP8 tensor cores; plan one GPU of it, without --gpus")
        if self.assumed.tflops is None and tuning_of(gpu.capability) is not HOPPER:
            raise UserError(
                f"--gpu {self.gpu}: the rates of a step were measured on an H200; give those of this GPU in TFLOP/s "
                "of BF16 and FP8, such as --tflops 605,950"
            )

    @cached_property
    def case(self) -> Case:
        """The model and the step of one GPU."""
        given = {"batch": self.batch, "seq": self.seq, "layers": self.layers, "rank": self.rank}
        return Request(self.model, self.mode, targets=self.targets, **given).case  # type: ignore[arg-type]

    @cached_property
    def device(self) -> Gpu:
        return find_gpu(self.gpu)

    @property
    def ways(self) -> list[Way]:
        return ways_of(self.case, self.strategy, self.recipe)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of checkpointing to try, the fastest first."""
        return CHECKPOINTING if self.checkpointing is None else (self.checkpointing,)

    def room(self, gpus: int) -> float:
        """Return bytes for tensors on each of so many GPUs."""
        return (self.device.room - (NCCL_GIB if gpus > 1 else 0.0)) * GIB


def parse_gpus(text: str) -> tuple[int, ...]:
    """Parse `64`, or several as in `8,64,512`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--gpus {text}: a number of GPUs, or several such as 8,64,512") from error
