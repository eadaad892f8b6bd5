"""The loss of GRPO against a plain reference: values and the gradient of every adapter."""

import math

import pytest
import torch
from decoder_cases import build

from octavo import FastLanguageModel
from octavo.rl.batches import Sample, pack
from octavo.rl.learner import Learner
from octavo.rl.loss import GRPOLoss, Tokens, Totals, gap_statistics, group_advantages, grpo_loss, token_logprobs

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """LoRA over a Llama frozen in FP8, weights only, in FP32; adapters are random on both sides."""
    folder = tmp_path_factory.mktemp("llama")
    build().save_pretrained(folder)
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), load_in_fp8="block", fp8_products=False, dtype=torch.float32, tokenizer=False
    )
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def samples(count=7):
    generator = torch.Generator().manual_seed(2)
    made = []
    for i in range(count):
        prompt, tokens = (
            torch.randint(1, 160, (n,), generator=generator).tolist() for n in (3 + i % 3, 2 + 3 * (i % 4))
        )
        noise = torch.randn(len(tokens), generator=generator)
        made.append(Sample(prompt, tokens, (-3 + noise).tolist(), float(torch.randn((), generator=generator))))
    return made


def plain(model, sample):
    """Log-probabilities of a completion, by the whole logits of its sequence alone."""
    ids = torch.tensor([[*sample.prompt, *sample.tokens]])
    logits = model(input_ids=ids, use_cache=False).logits[0].float() / TEMPERATURE
    start = len(sample.prompt)
    rows = logits[start - 1 : -1].log_softmax(dim=-1)
    return torch.stack([row[token] for row, token in zip(rows, sample.tokens, strict=True)])


def reference_loss(model, made, olds, loss, longest):
    """GRPO as the papers write it: a loop over sequences, and over nothing else."""
    means, total, tokens = [], 0.0, sum(len(sample.tokens) for sample in made)
    for sample, old in zip(made, olds, strict=True):
        new, rollout = plain(model, sample), torch.tensor(sample.logprobs)
        ratio = (new - old).exp()
        low, high = 1 - loss.epsilon, 1 + (loss.epsilon if loss.epsilon_high is None else loss.epsilon_high)
        each = -torch.min(ratio * sample.advantage, ratio.clamp(low, high) * sample.advantage)
        c = (old - rollout).exp() if loss.correction_level == "token" else (old - rollout).sum().exp()
        smallest = 0.0 if loss.correction_min is None else loss.correction_min
        if loss.correction == "tis":
            each = each * c.clamp(smallest, loss.correction_max)
        elif loss.correction == "mis":
            each = each * torch.where((c < smallest) | (c > loss.correction_max), torch.zeros_like(c), c)
        if loss.beta:
            with model.disable_adapter(), torch.no_grad():
                d_ref = plain(model, sample)
            d = d_ref - new
            each = each + loss.beta * (d.exp() - d - 1)
        means.append(each.mean())
        total = total + each.sum()
    if loss.loss_type == "grpo":
        return torch.stack(means).mean()
    return total / (tokens if loss.loss_type == "dapo" else len(made) * longest)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


CASES = [
    GRPOLoss(correction=correction, correction_level=level, beta=beta, loss_type=kind, correction_min=smallest)
    for correction, level, smallest in (
        ("tis", "token", None),
        ("tis", "sequence", 0.3),
        ("mis", "token", 0.5),
        ("mis", "sequence", None),
        ("none", "token", None),
    )
    for beta, kind in ((0.0, "dapo"), (0.04, "grpo"))
] + [GRPOLoss(loss_type="dr_grpo", epsilon=0.1, epsilon_high=0.3)]


@pytest.mark.parametrize("loss", CASES, ids=str)
def test_loss_and_every_gradient(model, loss):
    made, longest = samples(), 16
    noise = torch.Generator().manual_seed(9)
    with torch.no_grad():  # old ones a little off, so that some ratios are clipped
        olds = [plain(model, sample) + 0.3 * torch.randn(len(sample.tokens), generator=noise) for sample in made]
    if loss.correction_level == "sequence":  # near enough that a product of tokens is not always out of bounds
        made = [
            Sample(s.prompt, s.tokens, (old - 0.2 * torch.randn(len(old), generator=noise)).tolist(), s.advantage)
            for s, old in zip(made, olds, strict=True)
        ]
    expected = reference_loss(model, made, olds, loss, longest)
    expected_gradients = gradients(model, expected)

    learner, batches = Learner(model), pack(made, 40, torch.device("cpu"))
    assert len(batches) > 2
    totals = Totals(len(made), sum(len(s.tokens) for s in made), len(batches), longest)
    old, parts = torch.cat(olds), []
    for batch in batches:
        mine, old = old[: len(batch.targets)], old[len(batch.targets) :]
        reference = learner.reference(batch, TEMPERATURE) if loss.beta else None
        tokens = Tokens(mine, batch.rollout, reference, batch.sequence, batch.advantages, batch.lengths)
        parts.append(grpo_loss(learner.logprobs(batch, TEMPERATURE), tokens, loss, totals))
    actual = sum(part for part, _ in parts)
    assert sum(int(figures["clipped"]) for _, figures in parts) > 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    actual_gradients = gradients(model, actual)
    assert actual_gradients.keys() == expected_gradients.keys() and len(actual_gradients) == 28
    for name, gradient in actual_gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-5, atol=1e-6, msg=name)
        assert gradient.abs().max() > 1e-4, name


def test_means_over_tokens_of_micro_batches():
    """`bnpo` is the mean over micro-batches of each one's mean over its tokens; `dapo` that of all tokens."""
    sizes, losses = (3, 5), {}
    for kind in ("bnpo", "dapo"):
        parts = []
        for size in sizes:
            old = torch.zeros(size)
            tokens = Tokens(old, old, None, old.long(), torch.tensor([float(size)]), torch.tensor([size]))
            parts.append(grpo_loss(old, tokens, GRPOLoss(loss_type=kind), Totals(2, sum(sizes), 2, 9))[0])
        losses[kind] = float(sum(parts))
    assert losses == {"bnpo": pytest.approx(-4.0), "dapo": pytest.approx(-(9 + 25) / 8)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_logprobs(dtype, monkeypatch):
    monkeypatch.setattr("octavo.rl.loss.CHUNK_BYTES", 1)  # 128 tokens
    hidden = torch.randn(301, 24, dtype=dtype).requires_grad_()
    weight = torch.randn(57, 24, dtype=dtype).requires_grad_()
    tokens, g = torch.randint(0, 57, (301,)), torch.randn(301)
    actual = token_logprobs(hidden, weight, tokens, 0.5)
    exact_h, exact_w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    expected = ((exact_h @ exact_w.t()) / 0.5).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert actual.dtype == torch.float32  # FP32 logits, whatever the activations are in
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-4)
    pairs = zip(
        torch.autograd.grad(actual, (hidden, weight), g),
        torch.autograd.grad(expected, (exact_h, exact_w), g.double()),
        strict=True,
    )
    for one, other in pairs:
        assert one.dtype == dtype
        # one rounding of dl and one of the result
        atol = (1e-5 if dtype == torch.float32 else 2 * 2**-8) * float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=0, atol=atol)


def test_advantages():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0], [math.nan, 1.0, 3.0, math.nan]])
    group = group_advantages(rewards, "group")
    deviation = torch.tensor([1.0, 0.0, 0.0, 1.0]).std()
    torch.testing.assert_close(group[0], torch.tensor([0.5, -0.5, -0.5, 0.5]) / (deviation + 1e-4))
    assert torch.equal(group[1], torch.zeros(4))
    torch.testing.assert_close(group[2], torch.tensor([0.0, -1.0, 1.0, 0.0]) / (math.sqrt(2) + 1e-4))
    assert torch.equal(group_advantages(rewards, "none")[2], torch.tensor([0.0, -1.0, 1.0, 0.0]))
    known = rewards[rewards.isfinite()]
    torch.testing.assert_close(
        group_advantages(rewards, "batch")[0], torch.tensor([0.5, -0.5, -0.5, 0.5]) / (known.std() + 1e-4)
    )
    assert group_advantages(torch.full((2, 3), math.nan), "group").eq(0).all()
    equal = torch.tensor([[0.1], [0.3], [0.7], [1e30]]).expand(4, 7).clone()
    equal[:, 3] = math.nan
    for scale in ("group", "none"):
        assert group_advantages(equal, scale).eq(0).all(), "the mean of equal numbers is rounded"


@pytest.mark.parametrize(
    ("correction", "level", "expected"),
    [("none", "token", 0), ("tis", "token", 2), ("mis", "token", 2), ("none", "sequence", 0), ("tis", "sequence", 3)],
)
def test_corrections_are_counted(correction, level, expected):
    """Of the tokens whose weight is cut: ratios of 1.5, 3, 3 in one sequence, and of 1.5 in another, cut at 2."""
    old, rollout = torch.tensor([1.5, 3.0, 3.0, 1.5]).log() - 5, torch.full((4,), -5.0)
    sequence = torch.tensor([0, 0, 0, 1])
    given = Tokens(old, rollout, None, sequence, torch.ones(2), torch.tensor([3, 1]))
    loss = GRPOLoss(correction=correction, correction_level=level)
    _, figures = grpo_loss(old, given, loss, Totals(2, 4, 1, 8))
    assert figures["corrected"] == expected


def test_gap_statistics():
    rollout = torch.full((200,), -1.0)
    trainer = rollout.clone()
    trainer[:4] += math.log(1.5)
    figures = gap_statistics(trainer, rollout, GRPOLoss())
    d = math.log(1.5)
    assert figures["gap_mean"] == pytest.approx(4 * d / 200) and figures["gap_p99"] == pytest.approx(d)
    assert figures["gap_k3"] == pytest.approx(4 * (1.5 - d - 1) / 200, rel=1e-5)
    assert figures["gap_exp"] == pytest.approx((196 + 4 * 1.5) / 200) and figures["gap_clip"] == pytest.approx(0.02)
    assert gap_statistics(rollout[:0], rollout[:0], GRPOLoss())["gap_mean"] == 0


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("loss_type", "ppo", "choose one of grpo, dapo"),
        ("scale_rewards", True, "choose one of group"),
        ("beta", -0.1, "at least 0"),
        ("epsilon", 1.5, "at most 1"),
        ("correction_max", 0.5, "at least 1"),
        ("correction_min", 2.0, "from 0 to 1"),
        ("correction_level", "group", "choose one of token, sequence"),
    ],
)
def test_settings_are_checked(field, value, words):
    with pytest.raises(ValueError, match=f"{field}=.*{words}"):
        GRPOLoss(**{field: value})
