"""Checks that all engines share: of prompts, of the tokens that end a completion, and of what is returned."""

from collections.abc import Sequence

from octavo.rl.completions import Completion, Sampling
from octavo.rl.policy import Policy


def check_sampling(sampling: Sampling, exact_logprobs: bool) -> None:
    """Raise if tokens would be drawn from other probabilities than those reported, and those are to be exact."""
    if exact_logprobs and sampling.is_truncated:
        raise ValueError(
            f"{sampling.truncation} with exact_logprobs=True: tokens would be drawn from "
            "other probabilities than those reported, which correction by importance relies on; leave them out"
        )


def check_prompts(prompts: Sequence[Sequence[int]], policy: Policy, max_length: int | None) -> None:
    """Raise for a prompt that the model cannot read, or that leaves no room for a completion."""
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty: give it at least one token (the start of a sequence)")
        wrong = [t for t in prompt if not (isinstance(t, int) and 0 <= t < policy.vocabulary)]
        if wrong:
            raise ValueError(
                f"prompt {index} has the token {wrong[0]!r}; the model's vocabulary is 0 to {policy.vocabulary - 1}: "
                "is this the tokenizer of another model?"
            )
        if max_length is not None and len(prompt) >= max_length:
            positions = policy.positions
            what = f"max_length={max_length}" if max_length != positions else f"{positions} positions"
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens, and {what} leaves no room for a completion: shorten it"
            )


def check_stops(stop_ids: Sequence[int], policy: Policy) -> None:
    """Raise for a stop token that the model does not know."""
    wrong = [token for token in stop_ids if token >= policy.vocabulary]
    if wrong:
        raise ValueError(f"stop token {wrong[0]}: the model's vocabulary is 0 to {policy.vocabulary - 1}")


def check_finite(completions: Sequence[Completion]) -> None:
    """Raise for a log-probability that is NaN."""
    for completion in completions:
        if any(value != value for value in completion.logprobs):
            raise ValueError(
                f"a completion of prompt {completion.prompt} has a log-probability that is NaN: the model's logits are "
                "not finite; its weights or adapters have NaN or infinity in them"
            )
