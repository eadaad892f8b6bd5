"""Moments of a training step, the memory at each, and the peak, which is the largest.

    head               the layers have saved what they need; head and loss run
    head's step        with the optimiser in backward: where the head has a master, both halves joined, and in FP32
    last layer         the last layer goes backward: everything saved is still there, and its gradients come on top
    first layer        the first layer goes backward: almost all gradients are there, and one layer's activations
    embedding          all gradients are there

States are there at every moment, from the second step on; of those in host memory a few are (`host.py`). With the
optimiser in backward, gradients are freed one by one; that of the head is there with all that layers have saved. The
optimiser steps each parameter in place, so its moment is never the largest. Between moments, memory falls or rises by
one layer after the other: the ends decide. Gradients are made anew in each step, as after `zero_grad`.
"""

from collections.abc import Mapping

from octavo.tools.plan import host, persistent
from octavo.tools.plan.head import head_bytes
from octavo.tools.plan.layer import BF16, INPUT, backward_buffers, layer_input, saved_bytes
from octavo.tools.plan.options import Option
from octavo.tools.plan.timeline import WORKSPACE, Memory, Moment
from octavo.tools.shapes import Case

IN_FLIGHT = 2  # inputs of layers in transfer to and from the host


def plan_memory(case: Case, option: Option) -> Memory:
    """Return the memory that a training step takes."""
    return case.family.memory(case, option)


def plan_decoder(case: Case, option: Option) -> Memory:
    """Return the memory that a training step of a decoder takes."""
    layer = saved_bytes(case, option)
    all_saved, one_saved = _activations(case, option, layer)
    weights, states = persistent.weights(case, option), host.on_gpu(case, option)
    gradient_bytes = _gradients(case, option)
    backward = backward_buffers(case, option) + persistent.master_gradient(case, option)
    head, master = head_bytes(case, option), persistent.vocabulary_master(case, option)
    at_head = _at_head(case, option, all_saved)
    bottom = case.tokens * case.config["hidden_size"] * BF16
    # A tied embedding has a separate gradient, which is added to the head's. Hugging Face's head has a transposed one,
    # which autograd cannot add to in place, so the sum is a third.
    of_tied = gradient_bytes["head"] * (2 if option.code == "hf" else 1) if persistent.is_tied(case) else 0

    def moment(name: str, gradients: int, activations: int, buffers: int) -> Moment:
        return Moment(name, weights, gradients, states, activations, buffers + WORKSPACE)

    moments = [
        moment("head", head["gradients"], at_head + head["activations"], head["buffers"]),
        moment("last layer", gradient_bytes["last layer"], all_saved, backward),
        moment("first layer", gradient_bytes["first layer"], one_saved, backward),
        moment("embedding", gradient_bytes["embedding"], bottom, of_tied + master),
    ]
    if master and not persistent.is_tied(case):
        moments.insert(1, moment("head's step", gradient_bytes["head"], at_head, master))
    return Memory(option, tuple(moments), layer, host.on_host(case, option))


def _gradients(case: Case, option: Option) -> dict[str, int]:
    """Return the bytes of gradients at each moment. A tied head's is complete only at the embedding."""
    if case.frozen:
        every = persistent.gradients(case, option)
        return {"head": 0, "last layer": 0, "first layer": every, "embedding": every}
    head = persistent.vocabulary_parameters(case) * option.weight_bytes
    tied = head if persistent.is_tied(case) else 0
    if option.in_backward:
        return {"head": head, "last layer": tied, "first layer": tied, "embedding": head}
    every = persistent.gradients(case, option)
    layer = persistent.layer_parameters(case) * option.weight_bytes
    first_layer = every - layer - (head - tied)
    return {"head": head, "last layer": head, "first layer": first_layer, "embedding": every}


def _activations(case: Case, option: Option, layer: Mapping[str, int]) -> tuple[int, int]:
    """Return the bytes that layers have saved when the last goes backward, and when the first does."""
    one = sum(layer.values())
    if option.checkpointing == "none":
        return case.layers * one, one
    inside = one - layer.get(INPUT, 0)  # recomputed
    inputs = case.layers if option.checkpointing == "layers" else min(case.layers, IN_FLIGHT)
    whole = layer_input(case, option)
    return inputs * whole + inside, whole + inside


def _at_head(case: Case, option: Option, all_saved: int) -> int:
    """Return the activations at the head, when checkpointed layers have not recomputed anything yet."""
    if option.checkpointing == "none":
        return all_saved
    inputs = case.layers if option.checkpointing == "layers" else min(case.layers, IN_FLIGHT)
    return inputs * layer_input(case, option)
