"""The loop of GRPO: first ratios, packing, resuming to the bit, and what the reward does."""

import math
import signal

import pytest
import torch
from rl_cases import PlainEngine, adapted, vowel_task, vowels

from octavo.rl import grpo as module
from octavo.rl.grpo import GRPO
from octavo.rl.loss import group_advantages
from octavo.rl.rewards import Rewards
from octavo.rl.settings import GRPOSettings
from octavo.rl.tasks import Task
from octavo.training.errors import UserError
from octavo.training.signals import Interrupted

SETTINGS = {"prompts": 2, "completions": 4, "max_new_tokens": 5, "lr": 3e-3, "micro_batch_tokens": 30, "steps": 3}


@pytest.fixture
def start(tmp_path):
    def make(task=None, **changes):
        model, tokenizer = adapted(tmp_path, **{k: changes.pop(k) for k in ("products", "recipe") if k in changes})
        settings = GRPOSettings(**SETTINGS | changes)
        return GRPO(model, tokenizer, task or vowel_task(), PlainEngine(model), settings)

    return make


@pytest.mark.parametrize("products", [False, True], ids=["weights-only", "fp8"])
@pytest.mark.parametrize("changes", [{}, {"mini_batches": 2, "iterations": 2}], ids=["one step", "four steps"])
def test_the_first_ratio_is_exactly_one(start, monkeypatch, products, changes):
    ratios = []
    original = module.grpo_loss

    def recorded(logprobs, tokens, *rest):
        ratios.append((logprobs.detach() - tokens.old).exp())
        return original(logprobs, tokens, *rest)

    monkeypatch.setattr(module, "grpo_loss", recorded)
    counting = vowel_task([lambda completions, **_: [float(i) for i in range(len(completions))]])
    run = start(counting, products=products, **changes)
    row, _ = run.step(1)
    batches = len(ratios) // (4 if changes else 1)
    assert batches > 1
    assert all(ratio.eq(1).all() for ratio in ratios[:batches])
    assert all(not ratio.eq(1).all() for ratio in ratios[batches:])
    assert row["gap_mean"] < (0.2 if products else 1e-5)


def test_an_interrupt_is_no_error_of_the_engine_or_of_a_reward(start):
    """Outside of steps, where samples are written, a signal raises at once, wherever the program is."""

    def interrupted(*_, **__):
        raise Interrupted(signal.SIGTERM)

    run = start()
    completions = run.complete([[5, 6]], 1, 1)
    run.task.rewards.functions[:] = [interrupted]
    with pytest.raises(Interrupted):
        run.score([run.task.rows[0]], ["a"], completions)
    run.engine.generate = interrupted
    with pytest.raises(Interrupted):
        run.complete([[5, 6]], 1, 1)


def test_the_reward_rises_and_figures_are_complete(start):
    run = start(steps=12, lr=1e-2, beta=0.01)
    rows = [run.step(number)[0] for number in range(1, 13)]
    assert sum(row["reward"] for row in rows[-3:]) > 1.3 * sum(row["reward"] for row in rows[:3])
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[-1]["kl"] > 1e-4
    for name in ("loss", "grad_norm", "length", "truncated", "gap_p99", "gap_k3", "gap_exp", "clip_fraction"):
        assert all(math.isfinite(row[name]) for row in rows), name
    assert rows[0]["groups"] == 2 and rows[-1]["tokens"] > rows[0]["tokens"] > 0


def test_packing_changes_nothing(start):
    one, other = start(micro_batch_tokens=10_000), start(micro_batch_tokens=12)
    rows = [run.step(1)[0] for run in (one, other)]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], abs=1e-6)
    for (name, a), b in zip(one.trained().items(), other.trained().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4, msg=name)  # Adam divides tiny gradients by themselves


def test_a_resumed_run_takes_the_same_steps(start):
    whole = start()
    rows = [whole.step(number)[0]["reward"] for number in (1, 2, 3)]
    first = start()
    assert first.step(1)[0]["reward"] == rows[0]
    trained, state = {k: v.clone() for k, v in first.trained().items()}, first.state_dict()
    torch.manual_seed(99)
    second = start()
    second.load_state_dict(trained, state)
    assert [second.step(number)[0]["reward"] for number in (2, 3)] == rows[1:]
    for name, parameter in whole.trained().items():
        assert torch.equal(parameter, second.trained()[name]), name


def test_groups_with_equal_rewards_are_counted(start):
    run = start(vowel_task([lambda completions, **_: [1.0] * len(completions)]))
    before = {name: p.clone() for name, p in run.trained().items()}
    row, _ = run.step(1)
    assert (row["groups"], row["equal_groups"], row["unscored"]) == (2, 2, 0) and row["grad_norm"] == 0
    assert all(torch.equal(before[name], p) for name, p in run.trained().items())


def test_completions_without_a_reward_are_left_out_and_counted(start):
    def some(completions, **_):
        return [None if i % 4 == 1 else math.nan if i % 4 == 2 else float(i) for i in range(len(completions))]

    row, rollout = start(vowel_task([some])).step(1)
    assert row["unscored"] == 4 and row["left_out"] == 4 and row["equal_groups"] == 0
    assert sum(math.isnan(reward) for reward in rollout.rewards) == 4 and math.isfinite(row["reward"])


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "bnpo", "dapo"])
def test_truncated_completions_are_left_out_and_counted_as_in_trl(start, loss_type):
    # Ratios and corrections are 1, so the loss of a token is −A. TRL sets the mask of a truncated completion to 0:
    # a mean over sequences still counts it, a mean over tokens does not.
    changes = {"mask_truncated": True, "correction": "none", "loss_type": loss_type, "micro_batch_tokens": 10_000}
    run = start(vowel_task([lambda completions, **_: [float(i) for i in range(len(completions))]]), **changes)
    run.stop_ids = tuple(range(0, 256, 8))
    row, rollout = run.step(1)
    kept = torch.tensor([each.stopped for each in rollout.completions])
    lengths = torch.tensor([float(len(each.tokens)) for each in rollout.completions])
    advantages = group_advantages(torch.tensor(rollout.rewards, dtype=torch.float64).view(2, 4), "group").flatten()
    assert row["left_out"] == (~kept).sum() > 0 and kept.sum() > 1
    tokens = (advantages * lengths)[kept].sum()
    means = {
        "grpo": advantages[kept].sum() / 8,
        "dr_grpo": tokens / (8 * 5),
        "bnpo": tokens / lengths[kept].sum(),
        "dapo": tokens / lengths[kept].sum(),
    }
    assert row["loss"] == pytest.approx(-float(means[loss_type]), abs=1e-6)


def test_prompts_of_a_step_depend_on_seed_and_step(start):
    run = start()
    chosen = [[prompt.text for prompt in run.prompts.of_step(number)] for number in range(1, 7)]
    assert sorted(text for texts in chosen[:3] for text in texts) == sorted(f"say {i}:" for i in range(6))
    assert chosen == [[prompt.text for prompt in start().prompts.of_step(number)] for number in range(1, 7)]
    assert chosen[:3] != chosen[3:]  # the second pass has an order of its own
    seeds = {run.settings.sampling(number).seed for number in range(1, 100)}
    other = GRPOSettings(**SETTINGS, seed=1)
    assert len(seeds) == 99 and not seeds & {other.sampling(number).seed for number in range(1, 100)}


def test_reward_functions_see_columns(start):
    seen = {}

    def watched(prompts, completions, completion_ids, answer):
        seen.update(prompts=prompts, answer=answer, ids=completion_ids)
        return vowels(completions)

    start(vowel_task([watched])).step(1)
    assert [f"say {answer}:" for answer in seen["answer"]] == seen["prompts"] and len(seen["ids"]) == 8


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("a \ud800 b", r"the prompt 'a \\ud800 b' is no text: .*surrogate.* mend that row"),
        ([{"role": "user", "content": "\ud800"}], "is no text: .*surrogate"),
        ([{"role": "user", "content": None}], r"'content': None.* is no text, and the tokenizer has no chat template"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "is no text, and the tokenizer has no chat"),
    ],
)
def test_prompts_that_cannot_be_read(start, prompt, words):
    with pytest.raises(UserError, match=words):
        start(Task("odd", [{"prompt": "a"}, {"prompt": prompt}], Rewards([vowels])))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"completions": 1}, "completions=1: at least 2"),
        ({"prompts": 3, "mini_batches": 2}, "prompts=3: a multiple of mini_batches=2"),
        ({"top_p": 0.9}, "top_p=0.9 with correction='tis'"),
        ({"temperature": 0.0}, "temperature=0.0: above 0"),
    ],
)
def test_settings_are_checked(changes, words):
    with pytest.raises(ValueError, match=words):
        GRPOSettings(**SETTINGS | changes)
