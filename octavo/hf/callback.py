"""`OctavoCallback`: an FP8 model in the Trainer of transformers, or in those of TRL.

    octavo.convert_to_fp8(model)                                      # before the Trainer is built
    trainer = Trainer(model, args, ..., callbacks=[octavo.OctavoCallback()])

It says at the start what runs in FP8, adds FP8 statistics and speed to the Trainer's own logs, proves around the first
step that every trainable weight moves (`octavo/hf/update_check.py`), says what took the memory where it runs out
(`octavo/hf/out_of_memory.py`), and keeps the scaling state with the checkpoints: delayed scales come from the last
steps, so a run that resumes without them is another run.
"""

import io
import os
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from octavo.decoders.classes import is_fused
from octavo.hf.out_of_memory import explain_in
from octavo.hf.speed import Speed
from octavo.hf.trainer_on_stack import put_first, resumed_from, running_trainer
from octavo.hf.trl_loss import use_own_loss
from octavo.hf.update_check import SampledWeights, UpdateCheck
from octavo.nn.linear import FP8Linear, LinearInFP8
from octavo.nn.sharded import whole_numel
from octavo.numerics import FP8ScalingManager
from octavo.optim import keep_masters, offload_master, step_in_backward
from octavo.optim.in_backward import InBackward, why_not_in_backward
from octavo.optim.masters import why_not_offloaded
from octavo.optim.split_masters import has_master, why_without_masters
from octavo.support import emulation_on

MULTIPLE = 16  # tokens: FP8 products on tensor cores have operands of whole 16-byte units
WATCHED_BATCHES = 8
_HEAD = "lm_head.x"

logger = logging.get_logger(__name__)


class OctavoCallback(TrainerCallback):
    """Logs, checks and checkpoints for a model that was converted to FP8, or loaded into it.

    Every training log gets, over all FP8 tensors since the log before it and on this process:
    `fp8/underflow_mean`, `fp8/underflow_max`, `fp8/saturated_mean`, `fp8/saturated_max` (fractions of elements),
    `fp8/rescaled_mean`, `fp8/rescaled_max` (fractions of uses that a delayed scale did not hold), `fp8/scale_min` and
    `fp8/scale_max`; and `tokens_per_second` over all processes, without the time of evaluations and saves, if the
    Trainer counts tokens: `TrainingArguments(include_num_input_tokens_seen="non_padding")`. And `weights_moved`: of 64
    elements in each of up to 32 trained weights, the share that changed since the log before.

    `scaling`: statistics of this manager, for a model that runs under `octavo.fp8_autocast` (its `scaling`); by default
    those of the model's layers. `check_weights=False` leaves out the proof that weights move, and that share.
    `master_weights`: weights in BF16 are trained through FP32 ones (`octavo.optim.keep_masters`): the default, unless
    the model was loaded without; False lets each step round to BF16. `release_gradients`: each
    gradient is applied within backward, and its memory freed (`octavo.optim.step_in_backward`).
    `offload="master"`: that, too, and while it trains the model has FP8 weights only, and FP32 masters in host memory
    (`octavo.optim.offload_master`), which checkpoints then have. `own_loss`: TRL's `SFTTrainer` trains on the model's
    own loss, in chunks, with an FP8 head if it has one (`octavo/hf/trl_loss.py`); False leaves it to TRL, whose
    training logs then have `entropy` and `mean_token_accuracy`. `hints=False` leaves out advice on other settings.
    """

    def __init__(
        self,
        scaling: FP8ScalingManager | None = None,
        *,
        check_weights: bool = True,
        master_weights: bool | None = None,
        release_gradients: bool = False,
        offload: str | None = None,
        own_loss: bool = True,
        hints: bool = True,
    ) -> None:
        if offload not in (None, "master"):
            raise ValueError(f"offload={offload!r}: 'master', for FP32 weights in host memory, or None")
        self.scaling = scaling
        self.check_weights = check_weights
        self.master_weights = master_weights
        self.release_gradients = release_gradients
        self.offload = offload
        self.own_loss = own_loss
        self.hints = hints
        self._released: InBackward | None = None
        self._undo: list[Callable[[], None]] = []  # what was changed in the Trainer
        self._managers: list[FP8ScalingManager] = []
        self._check: UpdateCheck | None = None
        self._sample: SampledWeights | None = None
        self._speed = Speed()
        self._head_checked = False
        self._introduced = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = kwargs["model"]
        self._managers = [self.scaling] if self.scaling is not None else scaling_managers(model)
        if not self._managers and not any(is_fused(module) for module in model.modules()):
            raise ValueError(
                f"{type(model).__name__} has no FP8 layer: call octavo.convert_to_fp8(model) before the Trainer is "
                "built, load it with load_in_fp8, or leave OctavoCallback out"
            )
        trainer = running_trainer()
        if trainer is not None:
            _require_no_other_fp8(trainer)
            put_first(trainer, self)
            self._leave_trainer()  # a run that ended in an error has not come to its end
            self._undo.append(explain_in(trainer))
            if self.own_loss and (undo := use_own_loss(trainer)) is not None:
                self._undo.append(undo)
        if state.global_step:
            self._load(resumed_from(), args, state)
        keep_masters((p for p in model.parameters() if p.requires_grad), self.master_weights)
        if state.is_world_process_zero and not self._introduced:
            self._introduced = True
            _introduce(model, kwargs["optimizer"])
            if self.master_weights is None and (words := why_without_masters(kwargs["optimizer"])):
                logger.warning("octavo: %s", words)
            if self.hints:
                _advise(trainer, args)
        self._take_back()
        by_rewards = hasattr(args, "num_generations")  # TRL's GRPO and RLOO
        self._check = UpdateCheck(model, by_rewards=by_rewards) if self.check_weights else None
        if self.release_gradients or self.offload is not None:
            self._released = self._release(args, model, kwargs["optimizer"])
            if self.offload is not None and state.global_step:
                _read_again(model, self._released.optimizer, _resumed(resumed_from(), args, state))
        self._sample = SampledWeights(model, kwargs["optimizer"]) if self.check_weights else None
        self._head_checked = False
        self._speed = Speed(state.num_input_tokens_seen)

    def _release(self, args: TrainingArguments, model: nn.Module, optimizer: Any) -> InBackward:
        asked = "offload='master'" if self.offload else "release_gradients=True"
        for name, value, fix in (
            ("max_grad_norm", args.max_grad_norm, 0),
            ("gradient_accumulation_steps", args.gradient_accumulation_steps, 1),
        ):
            if value not in (fix, None):
                raise ValueError(
                    f"OctavoCallback({asked}) with {name}={value}: that needs all gradients at once; "
                    f"set TrainingArguments({name}={fix}), or leave {asked.partition('=')[0]} out"
                )
        optimizer = getattr(optimizer, "optimizer", optimizer)  # without what Accelerate puts around it
        reason = why_not_offloaded(optimizer) if self.offload else why_not_in_backward(optimizer)
        if reason:
            raise ValueError(f"OctavoCallback({asked}) {reason}; leave {asked.partition('=')[0]} out")
        if self._check is not None:
            self._check.watch(optimizer)  # before what takes the gradients away
        return offload_master(model, optimizer) if self.offload else step_in_backward(optimizer)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._check is not None:
            self._check.before_step(kwargs["optimizer"])

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._head_checked:
            self._head_checked = True
            self._require_head()
        if self._check is not None:
            self._check.after_step(kwargs["optimizer"])
            if self._check.done:
                self._end_check(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._speed.step_ended()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add to logs of training only: an evaluation records no statistics, and the last log is a summary."""
        logs = kwargs["logs"]
        if "loss" not in logs:
            return
        added = _statistics(self._managers)
        if self._sample is not None:
            added["weights_moved"] = self._sample.share_moved(kwargs["optimizer"])
        if args.include_num_input_tokens_seen != "no":
            added["tokens_per_second"] = self._speed.since_last_log(state.num_input_tokens_seen)
        logs.update(added)  # for the reporters, which come after this callback
        state.log_history[-1].update(added)  # a copy of `logs` that the Trainer made before

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._speed.other_work_ended()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._managers and not args.save_only_model and not state.is_hyper_param_search:
            folder = _checkpoint(args, state)
            folder.mkdir(parents=True, exist_ok=True)  # on a node with a disk of its own, rank 0 made it elsewhere
            content = {"step": state.global_step, "managers": [manager.state_dict() for manager in self._managers]}
            _write(folder / _file_name(args.process_index), content)
        self._speed.other_work_ended()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._check is not None:
            self._end_check(state)
        self._take_back()
        self._leave_trainer()

    def _take_back(self) -> None:
        """Undo the set-up of a run, also of one that broke off: its hooks would apply gradients in the next one."""
        if self._check is not None:
            self._check.close()
            self._check = None
        self._sample = None
        if self._released is not None:
            self._released.remove()
            self._released = None

    def _leave_trainer(self) -> None:
        """Give the Trainer back its methods."""
        while self._undo:
            self._undo.pop()()

    def _end_check(self, state: TrainerState) -> None:
        assert self._check is not None
        for line in self._check.findings() if state.is_world_process_zero else []:
            logger.warning(line)
        self._check.close()
        self._check = None

    def _require_head(self) -> None:
        """Raise if an FP8 head was asked for and not used: some trainers multiply the head's weight themselves."""
        for manager in self._managers:
            if _HEAD in manager.names and _HEAD not in manager.statistics(reset=False):
                raise RuntimeError(
                    "the head is converted to FP8, but this trainer computes logits and loss by itself and its FP8 "
                    "product never ran (label smoothing and a compute_loss_func do that, and TRL with own_loss=False "
                    "here); convert with fp8_head=False and 'lm_head' in skip, the default"
                )

    def _load(self, folder: str | None, args: TrainingArguments, state: TrainerState) -> None:
        if not self._managers:
            return
        checkpoint = _resumed(folder, args, state)
        names = (_file_name(args.process_index), _file_name(0))  # with more processes than before, those of the first
        path = next((checkpoint / name for name in names if (checkpoint / name).exists()), None)
        if path is None:
            logger.warning(
                f"{checkpoint} has no {names[-1]}: it was saved without OctavoCallback. Delayed scales start anew from "
                "the first batch, so the losses will differ a little from those of a run that was not interrupted"
            )
            return
        content = torch.load(path, map_location="cpu", weights_only=True)
        saved = [set(managed["names"]) for managed in content["managers"]]
        if content["step"] != state.global_step or saved != [set(manager.names) for manager in self._managers]:
            raise ValueError(
                f"{path} is of step {content['step']} and {sum(map(len, saved))} tensors; this run resumes at step "
                f"{state.global_step} with {sum(len(m.names) for m in self._managers)}: convert the model with the "
                "configuration it was trained with, or delete the file to start with new scales"
            )
        for manager, managed in zip(self._managers, content["managers"], strict=True):
            manager.load_state_dict(managed)


def scaling_managers(model: nn.Module) -> list[FP8ScalingManager]:
    """The scaling managers of a model's FP8 layers, each once, also inside what PEFT or DDP wrap around them."""
    managers = {id(m.scaling): m.scaling for m in model.modules() if isinstance(m, LinearInFP8)}
    return list(managers.values())


def _require_no_other_fp8(trainer: Any) -> None:
    """Raise if Accelerate's own FP8 is on: it puts other layers, with other Parameters, in the place of Octavo's."""
    if trainer.accelerator.mixed_precision == "fp8":
        raise ValueError(
            "mixed_precision='fp8': Accelerate has converted the model once more, by itself, in place of Octavo's FP8 "
            "layers; run with bf16=True in the training arguments, and without ACCELERATE_MIXED_PRECISION=fp8 or fp8 "
            "in the Accelerate configuration"
        )


def _statistics(managers: list[FP8ScalingManager]) -> dict[str, float]:
    tensors = [tensor for manager in managers for tensor in manager.statistics().values()]
    if not tensors:
        return {}
    statistics: dict[str, float] = {}
    for name in ("underflow", "saturated", "rescaled"):
        values = [tensor[name] for tensor in tensors]
        statistics |= {f"fp8/{name}_mean": fmean(values), f"fp8/{name}_max": max(values)}
    scales = [tensor["scale"] for tensor in tensors if tensor["scale"] > 0]  # 0: nothing but zeros so far
    if scales:
        statistics |= {"fp8/scale_min": min(scales), "fp8/scale_max": max(scales)}
    return statistics


def _summary(model: nn.Module) -> str:
    named = model.named_modules()
    linears = [m for name, m in named if isinstance(m, nn.Linear) and ".lora_" not in name]
    by_us = [linear for linear in linears if isinstance(linear, LinearInFP8)]
    in_fp8 = [linear for linear in by_us if linear.fp8_products]
    backward_alone = sum(not linear.fp8_forward for linear in in_fp8)
    trained = sum(whole_numel(p) for p in model.parameters() if p.requires_grad)
    how = f" ({'; '.join(sorted({str(linear.recipe) for linear in in_fp8}))})" if in_fp8 else ""
    how += f"; of {backward_alone} in backward alone" if backward_alone else ""
    how += f"; of {len(by_us) - len(in_fp8)} the weights alone" if len(by_us) > len(in_fp8) else ""
    return f"{len(in_fp8)} of {len(linears)} linears in FP8{how}; {trained:,} weights are trained"


def _emulation(model: nn.Module) -> str:
    linears = (module for module in model.modules() if isinstance(module, LinearInFP8))
    linear = next((linear for linear in linears if linear.fp8_products), None)
    return "" if linear is None else emulation_on(linear.scaling_device, linear.config.emulate)


def _masters(model: nn.Module, optimizer: Any) -> str:
    in_bf16 = [p for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
    with_master = sum(p.numel() for p in in_bf16 if has_master(getattr(optimizer, "optimizer", optimizer), p))
    rest = sum(p.numel() for p in in_bf16) - with_master
    words = f", {with_master:,} in BF16 with FP32 masters" if with_master else ""
    return words + (f", {rest:,} in BF16 without" if rest else "")


def _introduce(model: nn.Module, optimizer: Any) -> None:
    _say(_summary(model) + _masters(model, optimizer))
    if _emulation(model):
        _say(f"FP8 is {_emulation(model)}")


def _advise(trainer: Any, args: TrainingArguments) -> None:
    if args.include_num_input_tokens_seen == "no":
        _say('for tokens_per_second in the logs: TrainingArguments(include_num_input_tokens_seen="non_padding")')
    if trainer is not None:
        _watch_lengths(trainer)


def _watch_lengths(trainer: Any) -> None:
    """Look at the shapes of the first batches, and say so if the collator could pad them to what tensor cores take.

    The hook is on the outermost module, outside of what may be compiled, and goes after the last batch it looks at.
    """
    multiple = getattr(trainer.data_collator, "pad_to_multiple_of", MULTIPLE)  # a collator that cannot pad: no advice
    by_us = [module for module in trainer.model.modules() if isinstance(module, LinearInFP8)]
    weights_only = bool(by_us) and not any(module.fp8_products for module in by_us)
    if weights_only or (multiple is not None and multiple % MULTIPLE == 0):
        return
    odd: list[bool] = []

    def look(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        odd.append(ids is not None and ids.numel() % MULTIPLE != 0)
        if len(odd) == WATCHED_BATCHES:
            handle.remove()
            if any(odd):
                _say(
                    f"{sum(odd)} of the first {len(odd)} batches have a number of tokens that {MULTIPLE} does not "
                    f"divide; on a GPU FP8 products are faster with pad_to_multiple_of={MULTIPLE} in the data collator"
                )

    handle = trainer.model_wrapped.register_forward_pre_hook(look, with_kwargs=True)


def _say(line: str) -> None:
    print(f"octavo: {line}", flush=True)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    assert args.output_dir is not None
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _resumed(folder: str | None, args: TrainingArguments, state: TrainerState) -> Path:
    return Path(folder) if folder is not None else _checkpoint(args, state)


def _read_again(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Read masters and their states again, in FP32: the Trainer read them into BF16 weights before there were any."""
    missing = {
        f"{name}.weight" for name, m in model.named_modules() if isinstance(m, FP8Linear) and m.fp8_only is not None
    }
    for file in sorted(checkpoint.glob("*.safetensors")):
        weights = load_file(file)
        missing -= weights.keys()
        model.load_state_dict(weights, strict=False)
    if missing:
        raise ValueError(f"{checkpoint} has no {sorted(missing)[0]}: its masters cannot be had from there")
    optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True))


def _file_name(process: int) -> str:
    return f"octavo_scaling_{process}.pt"


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write all of a file or nothing, whenever the process is killed."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as file:
        file.write(buffer.getvalue())
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
