"""Slots in all states, and a token for each."""

import torch


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def new_slots(slots=300, length=9, vocabulary=40):
    """Arguments of `begin_step` and of `end_step_`: slots that are empty, full, about to end, without a prompt."""
    active = torch.rand(slots) < 0.7
    lengths = torch.randint(0, length, (slots,), dtype=torch.int32)
    group_of, prefix_lengths = torch.randint(-1, 5, (slots,), dtype=torch.int32), ints([3, 0, 70_000, 5, 11])
    limits = lengths + torch.randint(1, 5, (slots,), dtype=torch.int32)
    tokens, logprobs = torch.randint(0, vocabulary, (slots, length)), torch.randn(slots, length)
    newest, token = torch.randint(0, vocabulary, (2, slots))
    stops = torch.rand(vocabulary) < 0.3
    begin = (active, lengths, group_of, prefix_lengths)
    return begin, (tokens, logprobs, newest, lengths, active, token, torch.randn(slots), stops, limits)


def copies(tensors, device="cpu"):
    return tuple(x.clone().to(device) for x in tensors)
