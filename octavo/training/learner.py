"""`Learner`: the model, data and settings of a run, trained by `RunTrainer`; evaluation, a sample and the saved state.

A step takes its micro-batches from the data and gives them to the trainer, which accumulates, clips and updates. It is
skipped if its loss or its gradient norm is non-finite.

Training runs through the code that the settings name: fused layers, the model as `torch.compile` makes it, or the model
as it was written. Evaluation and samples always take the latter; of a model with fused layers, that is in `dtype`.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import set_stance

from octavo.dist.optimizer_states import cut_states
from octavo.dist.together import rank
from octavo.dist.whole import cut
from octavo.models.bdh import BDH, fuse
from octavo.nn.report import Report
from octavo.numerics import FP8ScalingManager
from octavo.optim import build_optimizer, set_learning_rate
from octavo.support import require_tensor_cores
from octavo.training.data import ByteData, get_evaluation_batch, get_share
from octavo.training.errors import RunError, UserError
from octavo.training.run_trainer import RunTrainer, TakenStep
from octavo.training.settings import DTYPES, TrainSettings
from octavo.training.several_ranks import own_random_numbers, wrapped
from octavo.training.trainer import Step

PROMPT_BYTES = 64
PROMPT_LINE = re.compile(rb"(?<=\n)\w.{8,62}\n")  # a whole line, not indented
SAMPLE_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Sample:
    """A held-out line, and the model's continuation."""

    prompt: str
    written: str


class Learner:
    """A BDH model with its optimiser and data, as the settings of a run describe them."""

    def __init__(self, settings: TrainSettings, data: ByteData) -> None:
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise UserError("device='cuda': torch sees no CUDA device here; use --device cpu")
        try:
            require_tensor_cores(settings.device, settings.fp8)
        except RuntimeError as error:
            raise UserError(str(error)) from error
        self.settings, self.data = settings, data
        self.device = torch.device(settings.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        torch.backends.cuda.matmul.allow_tf32 = settings.tf32
        torch.manual_seed(settings.seed)
        self.model = BDH(settings.shape).to(self.device)
        if settings.fused:
            fuse(self.model, settings.fp8)
        elif settings.compile:
            self.model.compile()
        called = wrapped(self.model, settings)
        own_random_numbers(settings.seed)
        try:
            self.optimizer = build_optimizer(
                settings.optimizer,
                self.model.parameters(),
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                betas=(settings.beta1, settings.beta2),
            )
        except ModuleNotFoundError as error:
            raise UserError(str(error)) from error
        self.trainer = RunTrainer(
            called,
            self.optimizer,
            settings.fp8,
            convert_model_to_fp8=settings.precision == "fp8",
            gradient_accumulation_steps=settings.own_micro_batches,
            max_grad_norm=settings.clip or None,
            autocast_dtype=None if settings.dtype == "float32" else DTYPES[settings.dtype],
        )

    @property
    def scaling(self) -> FP8ScalingManager | None:
        """Scaling state of the FP8 products; None in other precisions."""
        return self.trainer.scaling

    @property
    def report(self) -> Report | None:
        """Products of the model, in FP8 or not and why; None in other precisions."""
        return self.trainer.report

    def step(self, number: int) -> Step | TakenStep:
        """Take optimiser step `number`, counted from 1; on a GPU, without waiting for it where that is possible."""
        set_learning_rate(self.optimizer, self.settings.learning_rate(number))
        with _compile_errors():
            return self.trainer.take_step(self._batches(number))

    def _batches(self, number: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield the micro-batches of a step, on the device."""
        settings = self.settings
        inputs, targets = get_share(
            self.data.train,
            seed=settings.seed,
            step=number,
            batch=settings.batch,
            micro_batches=settings.micro_batches,
            sequence=settings.seq,
            rank=rank(),
            ranks=settings.ranks,
        )
        count = settings.own_micro_batches
        for batch in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            if self.device.type == "cuda":
                # From pageable memory, or from rows with gaps, the host would wait for everything queued before.
                yield tuple(part.contiguous().pin_memory().to(self.device, non_blocking=True) for part in batch)
            else:
                yield batch

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over held-out sequences, which are the same in every run."""
        settings = self.settings
        self.model.eval()
        total = torch.zeros((), device=self.device)
        for index in range(settings.evaluation_batches):
            tokens, targets = get_evaluation_batch(
                self.data.held_out,
                index=index,
                count=settings.evaluation_batches,
                batch=settings.batch,
                sequence=settings.seq,
            )
            total += self._loss(tokens, targets)
        self.model.train()
        return total.item() / settings.evaluation_batches

    def sample(self) -> Sample:
        """Continue a held-out line. Raises FloatingPointError if the model has diverged."""
        beginning = bytes(self.data.held_out[:4096].tolist())
        line = PROMPT_LINE.search(beginning)
        prompt = line.group() if line else beginning[:PROMPT_BYTES]
        tokens = torch.tensor([list(prompt)], device=self.device)
        generator = torch.Generator(self.device).manual_seed(self.settings.seed)
        for _ in range(self.settings.sample_bytes):
            # Entered for every forward: FP8 products are told apart by their order after entering.
            with self._as_written():
                tokens = self.model.generate(
                    tokens, 1, temperature=SAMPLE_TEMPERATURE, generator=generator, context=self.settings.seq
                )
        written = bytes(tokens[0, len(prompt) :].tolist())
        return Sample(prompt.decode(errors="replace"), written.decode(errors="replace"))

    def state_dict(self) -> dict[str, Any]:
        """Return everything the next step depends on, besides the parameters, the settings and the data."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaling": self.scaling.state_dict() if self.scaling is not None else None,
            "rng_cpu": torch.get_rng_state(),
            "rng_cuda": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
        }

    def load_state_dict(self, parameters: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(cut(parameters, self.model))
        self.optimizer.load_state_dict(cut_states(self.optimizer, state["optimizer"]))
        if self.scaling is not None:
            self.scaling.load_state_dict(state["scaling"])
        torch.set_rng_state(state["rng_cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["rng_cuda"])
        own_random_numbers(self.settings.seed)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self._as_written():
            return self.model(tokens.to(self.device), targets.to(self.device))[1]

    @contextmanager
    def _as_written(self) -> Iterator[None]:
        """Region in which the model computes in the run's precision, and not as `torch.compile` makes it."""
        compiled = self.settings.compile and not self.settings.fused
        with self.trainer.autocast(), set_stance("force_eager") if compiled else nullcontext():
            yield


@contextmanager
def _compile_errors() -> Iterator[None]:
    """Turn an error of `torch.compile` (no compiler on the machine, most often) into one clear line."""
    try:
        yield
    except RuntimeError as error:
        if not type(error).__module__.startswith(("torch._dynamo.", "torch._inductor.")):
            raise
        raise RunError(
            f"torch.compile failed: {str(error).splitlines()[0]}; train without it, in a run of its own: --no-compile"
        ) from error
