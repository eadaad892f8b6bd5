"""TRL's `GRPOTrainer` with an engine of ours: its log-probabilities reach the trainer, and so does the correction.

    trainer = OctavoGRPOTrainer(model, reward_funcs, args=GRPOConfig(...), train_dataset=...)

Stock TRL reaches an engine through `model.generate` (`octavo.rl.attach`), which returns tokens alone: no correction,
and no gap in the logs. Here the engine is asked directly. TRL's own correction then runs, with its own names:
`vllm_importance_sampling_correction`, `…_mode` (`token_truncate` and `sequence_truncate` are TIS, `token_mask` and
`sequence_mask` MIS) and `…_clip_max`; its logs have `sampling/sampling_logp_difference`. `generation_kwargs` may have
`stop_strings`.
"""

import inspect
import logging
from typing import Any

from trl import GRPOTrainer

from octavo.hf.trl import take_tokenizer
from octavo.rl.attach import attached
from octavo.rl.completions import Engine, Sampling
from octavo.rl.engine import NativeEngine
from octavo.rl.learner import leave_dropout_out
from octavo.rl.stops import StopTexts
from octavo.rl.trl_vllm import STOPS, leave_vllm_out

logger = logging.getLogger("octavo")


class OctavoGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` whose completions come from an engine on the trained modules, with nothing to synchronise.

    Dropout of the model is left out: a rollout has none, and the correction would take it for the gap.
    `engine`: None takes the one that is attached to the model, or else makes a native one.
    """

    takes_stop_strings = True

    def __init__(self, model: Any, *args: Any, engine: Engine | None = None, **kwargs: Any) -> None:
        take_tokenizer(kwargs)
        given = inspect.signature(GRPOTrainer.__init__).bind(self, model, *args, **kwargs).arguments
        config = given.get("args")
        leave_vllm_out(config, engine or (attached(model) if hasattr(model, "config") else None), "")
        if config is not None and config.use_vllm:
            raise ValueError(
                "use_vllm=True: TRL would start a vLLM with weights of its own; leave it out, and give an engine "
                "(engine=octavo.rl.vllm.VLLMEngine(model)) if it is to be vLLM"
            )
        for name in ("tools", "rollout_func", "environment_factory"):
            if given.get(name):
                raise ValueError(f"{name}: not with an engine of ours, which completes prompts once; use GRPOTrainer")
        super().__init__(model, *args, **kwargs)
        own: Any = self.model
        leave_dropout_out(own)
        self._refuse_other_sampling()
        self.engine: Engine = engine or attached(self.model) or NativeEngine(self.model, exact_logprobs=True)
        sampling = self._sampling()
        if self.vllm_importance_sampling_correction and sampling.is_truncated:
            raise ValueError(
                f"{sampling.truncation} with vllm_importance_sampling_correction=True: tokens "
                "are drawn from another distribution than that of the log-probabilities; set one of them only"
            )
        self._said_cut = False
        self.use_vllm = True  # from here on, this says that there are log-probabilities of the rollout

    def _refuse_other_sampling(self) -> None:
        """Raise for settings of TRL's that change what is sampled, and that the engines do not have."""
        args: Any = self.args
        kwargs = {name: value for name, value in (args.generation_kwargs or {}).items() if name != STOPS}
        for name, value, neutral in (
            ("repetition_penalty", args.repetition_penalty, 1.0),
            ("generation_kwargs", kwargs, {}),
        ):
            if value is not None and value != neutral:
                raise ValueError(
                    f"{name}={value!r}: the engine samples by temperature, top_k, top_p and min_p, and stops at "
                    f"generation_kwargs[{STOPS!r}]; leave it out, or use TRL's GRPOTrainer, whose completions then "
                    "come from transformers' generate"
                )
        if self._stop_texts() and args.mask_truncated_completions:
            raise ValueError(
                "mask_truncated_completions=True with stop_strings: TRL takes every completion that an end of text "
                "does not end for truncated, and would learn from none; leave one of them out"
            )

    def _sampling(self) -> Sampling:
        args: Any = self.args
        return Sampling(
            max_new_tokens=args.max_completion_length,
            temperature=self.temperature,
            top_k=args.top_k if args.top_k and args.top_k > 0 else None,
            top_p=args.top_p if args.top_p < 1 else None,
            min_p=args.min_p or None,
            stop_ids=tuple(self.eos_token_ids),
            stop_texts=self._stop_texts(),
        )

    def _stop_texts(self) -> StopTexts | None:
        args: Any = self.args
        texts = (args.generation_kwargs or {}).get(STOPS)
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        return StopTexts(tokenizer, texts) if texts else None

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: Any,
        num_generations: int,  # noqa: ARG002
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Complete the prompts, each of which is there as often as it is to be completed."""
        if images is not None or multimodal_fields or has_tool_images:
            raise ValueError("images: the engines complete text; use GRPOTrainer")
        sampling = self._sampling()
        longest, limit = max(map(len, prompt_ids)), self.engine.max_length
        if limit is not None and longest + sampling.max_new_tokens > limit and not self._said_cut:
            self._said_cut = True
            logger.warning(
                "octavo: a prompt of %s tokens leaves less than max_completion_length=%s of the engine's %s: such "
                "completions end there, and count as cut off",
                longest, sampling.max_new_tokens, limit,
            )  # fmt: skip
        completions = self.engine.generate(prompt_ids, 1, sampling)
        return [each.tokens for each in completions], [each.logprobs for each in completions]
