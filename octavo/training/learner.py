"""A model that learns: one optimiser step, evaluation, a sample, and everything needed to go on later.

One step, over n micro-batches:

    loss = mean of the n losses          forward in the chosen precision, loss in FP32
    grad = mean of the n gradients       parameters are FP32, so their gradients add up in FP32
    grad *= min(1, clip / ‖grad‖)
    parameters, optimiser states, FP8 histories move    only if loss and ‖grad‖ are finite

The one wait for the device is for those two numbers.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from octavo.models.bdh import BDH
from octavo.nn.autocast import fp8_autocast
from octavo.optim import build_optimizer, set_learning_rate
from octavo.support import require_tensor_cores
from octavo.training.data import ByteData, get_batch, get_evaluation_batch
from octavo.training.errors import UserError
from octavo.training.settings import TrainSettings

PROMPT_BYTES = 64
PROMPT_LINE = re.compile(rb"(?<=\n)\w.{8,62}\n")  # a whole line, not indented
SAMPLE_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Step:
    """What one step gave. A step whose loss or gradient is not finite was skipped: nothing learnt from it."""

    loss: float
    grad_norm: float

    @property
    def skipped(self) -> bool:
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))


@dataclass(frozen=True)
class Sample:
    """A held-out line, and how the model went on."""

    prompt: str
    written: str


class Learner:
    def __init__(self, settings: TrainSettings, data: ByteData) -> None:
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise UserError("device='cuda': torch sees no CUDA device here; use --device cpu")
        try:
            require_tensor_cores(settings.device, settings.fp8)
        except RuntimeError as error:
            raise UserError(str(error)) from error
        self.settings, self.data = settings, data
        self.device = torch.device(settings.device)
        torch.backends.cuda.matmul.allow_tf32 = settings.tf32
        torch.manual_seed(settings.seed)
        self.model = BDH(settings.shape).to(self.device)
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
        self.fp8 = fp8_autocast(settings.fp8, model=self.model) if settings.precision == "fp8" else None

    @contextmanager
    def precision(self) -> Iterator[None]:
        """The region in which the model computes in the chosen precision."""
        with ExitStack() as stack:
            if self.settings.dtype == "bfloat16":
                stack.enter_context(torch.autocast(self.device.type, dtype=torch.bfloat16))
            if self.fp8 is not None:
                stack.enter_context(self.fp8)
            yield

    def step(self, number: int) -> Step:
        """Optimiser step `number`, counted from 1."""
        settings = self.settings
        set_learning_rate(self.optimizer, settings.learning_rate(number))
        total = torch.zeros((), device=self.device)
        for micro_batch in range(settings.micro_batches):
            tokens, targets = get_batch(
                self.data.train,
                seed=settings.seed,
                step=number,
                micro_batch=micro_batch,
                batch=settings.batch,
                sequence=settings.seq,
            )
            loss = self._loss(tokens, targets) / settings.micro_batches
            loss.backward()
            total += loss.detach()

        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm(gradients)
        if settings.clip:
            clip_grads_with_norm_(self.model.parameters(), settings.clip, norm)
        result = Step(*torch.stack((total, norm)).tolist())
        if not result.skipped:
            self.optimizer.step()
        elif self.fp8 is not None:
            self.fp8.scaling.step()  # forgets the step's amax; without it the next good step would not count either
        self.optimizer.zero_grad()
        return result

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss over held-out sequences, the same ones whatever the run."""
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
        """A held-out line and how the model goes on. FloatingPointError: of a model that has diverged."""
        beginning = bytes(self.data.held_out[:4096].tolist())
        line = PROMPT_LINE.search(beginning)
        prompt = line.group() if line else beginning[:PROMPT_BYTES]
        tokens = torch.tensor([list(prompt)], device=self.device)
        generator = torch.Generator(self.device).manual_seed(self.settings.seed)
        for _ in range(self.settings.sample_bytes):
            with self.precision():  # anew for every forward: FP8 products are told apart by their order after entering
                tokens = self.model.generate(
                    tokens, 1, temperature=SAMPLE_TEMPERATURE, generator=generator, context=self.settings.seq
                )
        written = bytes(tokens[0, len(prompt) :].tolist())
        return Sample(prompt.decode(errors="replace"), written.decode(errors="replace"))

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, besides the parameters, the settings and the data."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaling": self.fp8.scaling.state_dict() if self.fp8 is not None else None,
            "rng_cpu": torch.get_rng_state(),
            "rng_cuda": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
        }

    def load_state_dict(self, parameters: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(parameters)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.fp8 is not None:
            self.fp8.scaling.load_state_dict(state["scaling"])
        torch.set_rng_state(state["rng_cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["rng_cuda"])

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.precision():
            return self.model(tokens.to(self.device), targets.to(self.device))[1]
