"""Memory that persists from step to step, weights and optimiser states, and the gradients.

states   bytes per number trained: adamw 2 of the weight's dtype (torch makes them like the weight); adamw8bit and
         adamwfp8 two of one byte, with an FP32 scale for 256; adamw4bit two of half a byte, with one for 128
masters  of BF16 weights: two bytes more, the lower halves, and adamw's states are in FP32
"""

from octavo.numerics.quantize import BLOCK
from octavo.tools.plan.layer import FP32, Sizes
from octavo.tools.plan.options import Option
from octavo.tools.shapes import MEMBERS, Case

LOW_HALF = 2.0
LOW_BIT_STATES = {"adamw8bit": (1.0, 256), "adamwfp8": (1.0, 256), "adamw4bit": (0.5, 128)}


def layer_matrices(case: Case) -> list[tuple[int, int]]:
    """Return outputs and inputs of each linear of a layer."""
    s = Sizes.of(case)
    outputs = {"q_proj": s.q, "k_proj": s.kv, "v_proj": s.kv, "o_proj": s.k}
    outputs |= {"gate_proj": s.f, "up_proj": s.f, "down_proj": s.k}
    inputs = {"o_proj": s.q, "down_proj": s.f}
    return [(outputs[name], inputs.get(name, s.k)) for members in MEMBERS.values() for name in members]


def is_tied(case: Case) -> bool:
    """Return True if embedding and head are one matrix."""
    return bool(case.config.get("tie_word_embeddings", False))


def vocabulary_parameters(case: Case) -> int:
    """Return the number of parameters of the head, and thus of the embedding."""
    return case.vocabulary * int(case.config["hidden_size"])


def layer_parameters(case: Case) -> int:
    return sum(n * k for n, k in layer_matrices(case))


def norm_parameters(case: Case) -> int:
    s = Sizes.of(case)
    return case.layers * (2 * s.k + (2 * case.head_dim if s.has_qk_norm else 0)) + s.k


def parameters(case: Case) -> int:
    """All of the model's, biases apart, adapters apart."""
    return case.family.trained_values(case)


def decoder_parameters(case: Case) -> int:
    """Return the number of a decoder's values, biases and adapters apart."""
    matrices = case.layers * layer_parameters(case) + vocabulary_parameters(case) * (1 if is_tied(case) else 2)
    return matrices + norm_parameters(case)


def weights(case: Case, option: Option) -> int:
    adapters = case.adapter_parameters * option.adapter_bytes
    if option.code != "fp8" or not (case.frozen or option.offload == "master"):
        return parameters(case) * option.weight_bytes + adapters
    layers = case.layers * layer_parameters(case)
    scales = {
        "channel": sum(n for n, _ in layer_matrices(case)),
        "block": sum(-(-n // BLOCK) * -(-k // BLOCK) for n, k in layer_matrices(case)),
        "delayed": len(layer_matrices(case)),
    }[str(option.recipe)]
    others = (parameters(case) - layers) * option.weight_bytes
    return layers + case.layers * scales * FP32 + others + adapters


def trained(case: Case) -> int:
    """Return the number of parameters that have a gradient."""
    return case.adapter_parameters if case.frozen else parameters(case)


def trained_bytes(case: Case, option: Option) -> int:
    """Return the bytes per trained parameter."""
    return option.adapter_bytes if case.frozen else option.weight_bytes


def gradients(case: Case, option: Option) -> int:
    return trained(case) * trained_bytes(case, option)


def state_bytes(case: Case, option: Option, *, of_master: bool = False) -> tuple[float, ...]:
    """Return the bytes of states per trained parameter, by tensor: two moments with their scales, and a low half."""
    if option.optimizer is None:
        return ()
    low = (LOW_HALF,) if option.masters and not of_master else ()
    if option.optimizer == "adamw":
        return *low, *(FP32 if of_master or option.masters else trained_bytes(case, option),) * 2
    size, block = LOW_BIT_STATES[option.optimizer]
    return *low, *(size, FP32 / block) * 2


def states(case: Case, option: Option) -> int:
    """Return the bytes of all states, on the GPU and on the host."""
    layers = case.layers * layer_parameters(case) if option.offload == "master" else 0
    others = (trained(case) - layers) * sum(state_bytes(case, option))
    return round(layers * sum(state_bytes(case, option, of_master=True)) + others)


def master_gradient(case: Case, option: Option) -> int:
    """Return bytes of the FP32 gradient of the largest matrix, since masters are stepped one by one.

    Split masters stepped in backward are joined, which takes as much again. (No optimiser of ours takes more.)
    """
    largest = FP32 * max(n * k for n, k in layer_matrices(case))
    if option.offload == "master":
        return largest
    return 2 * largest if option.masters and option.in_backward else 0


def vocabulary_master(case: Case, option: Option) -> int:
    """Return bytes of the joined master and FP32 gradient of the embedding or the head."""
    return 2 * FP32 * vocabulary_parameters(case) if option.masters and option.in_backward else 0
