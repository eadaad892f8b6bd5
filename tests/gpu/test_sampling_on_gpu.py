"""Tokens drawn on the GPU against the specification; launched twice, and from a CUDA graph with new seeds."""

import pytest
import torch
from sampling_cases import assert_same_choice, new_logits

from octavo.ops import sampling
from octavo.rl.completions import Sampling
from octavo.rl.sampling import choose


def one():
    return torch.ones((), device="cuda")


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 1000), (64, 49_152), (64, 128_256), (1, 128_256), (256, 32_003)])
def test_choice(shape, temperature):
    logits = new_logits(*shape).cuda()
    given = (logits, one() * (temperature or 1.0), torch.tensor([2**50 + 1], device="cuda"), not temperature)
    assert sampling.has_kernel(logits)
    first, second = (sampling.sample(*given[:3], greedy=given[3]) for _ in range(2))
    assert_same_choice(first, given)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_rows_that_are_not_aligned():
    wide = new_logits(9, 5003).cuda()
    for logits in (wide[:, :4096], wide[:, 1:4097], wide):
        given = (logits, one(), torch.tensor([8], device="cuda"), False)
        assert_same_choice(sampling.sample(*given[:3]), given)


def test_logits_that_are_not_finite():
    logits = new_logits(4, 5000).cuda()
    logits[0, 4900] = torch.nan
    logits[1, 5] = torch.inf
    logits[2] = -torch.inf
    for greedy in (False, True):
        token, logprob = sampling.sample(logits, one(), torch.tensor([8], device="cuda"), greedy=greedy)
        assert logprob[:3].isnan().all() and logprob[3].isfinite() and ((token >= 0) & (token < 5000)).all()


def test_shares_are_those_of_softmax():
    logits = torch.tensor([2.0, 0.0, 1.0, -torch.inf, -3.0], device="cuda")
    token, _ = sampling.sample(logits.repeat(20_000, 1), one(), torch.tensor([0], device="cuda"))
    expected = logits.softmax(-1)
    shares = torch.bincount(token, minlength=5) / 20_000
    assert ((shares - expected).abs() <= 5 * (expected * (1 - expected) / 20_000).sqrt()).all()


def test_a_graph_draws_anew():
    """As the engine records it: other noise with every replay, the same after the same seed."""
    logits, generator = torch.zeros(64, 1000, device="cuda"), torch.Generator("cuda")
    sampled, temperature = Sampling(), one()
    choose(logits, sampled, temperature, generator)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        token, _ = choose(logits, sampled, temperature, generator)
    runs = []
    for seed in (1, 1, 2):
        generator.manual_seed(seed)
        for _ in range(2):
            graph.replay()
            runs.append(token.clone())
    assert torch.equal(runs[0], runs[2]) and torch.equal(runs[1], runs[3])
    for a, b in ((0, 1), (0, 4), (1, 5)):
        assert (runs[a] == runs[b]).double().mean() < 0.2
