"""States, and master weights, in host memory: what of them is on the GPU at each moment, and what the host has to hold.

They come to the GPU for the step of their parameter, those of the next `AHEAD` on their way (`optim/host_states.py`).
The parameters take turns, and after the last comes the first again, so its states wait through the step that follows:

    in backward      head, norm, last layer, …, first layer, embedding, and again the head, …
    all in step()    embedding, first layer, …, last layer, norm, head, and again the embedding, …

Counted in numbers that are trained: V of the head, as many of the embedding; L of the largest matrix of a layer. Norms
are too small to count. A tied head has one turn, the embedding's.
"""

from octavo.optim.host_states import AHEAD
from octavo.tools.bench.cases import Case
from octavo.tools.plan import standing
from octavo.tools.plan.layer import FP32, layer_input
from octavo.tools.plan.options import Option


def on_gpu(case: Case, option: Option) -> dict[str, int]:
    """Bytes of states at each moment; those in host memory with their master weights."""
    if option.offload is None:
        every = standing.states(case, option)
        return dict.fromkeys(("head", "head's step", "last layer", "first layer", "embedding", "step"), every)
    v, largest = standing.vocabulary_parameters(case), max(n * k for n, k in standing.layer_matrices(case))
    head = 0 if standing.is_tied(case) else v
    if option.in_backward:
        layer = (1 + AHEAD) * largest
        numbers = {
            "head": head or AHEAD * largest,
            "head's step": head + (AHEAD - 1) * largest,
            "last layer": layer,
            "first layer": layer,
            "embedding": v + head,
            "step": v + head + (0 if head else AHEAD * largest),
        }
    else:
        waiting = v + (AHEAD - 1) * largest
        numbers = dict.fromkeys(("head", "last layer", "first layer", "embedding"), waiting)
        numbers["step"] = v + AHEAD * largest
    each = sum(_tensors(case, option))
    return {moment: round(count * each) for moment, count in numbers.items()}


def on_host(case: Case, option: Option) -> int:
    """Bytes of host memory, pinned; torch gives each tensor there a power of two."""
    found = 0
    if option.offload is not None:
        matrices = [n * k for n, k in standing.layer_matrices(case)] * case.layers
        matrices += [standing.vocabulary_parameters(case)] * (1 if standing.is_tied(case) else 2)
        found += sum(_power_of_two(n * each) for n in matrices for each in _tensors(case, option))
    if option.checkpointing == "offload":
        found += case.layers * layer_input(case, option)
    return found


def _tensors(case: Case, option: Option) -> tuple[float, ...]:
    """Bytes of one number in each of the tensors that come and go."""
    master = (FP32,) if option.offload == "master" else ()
    return (*master, *standing.state_bytes(case, option))


def _power_of_two(size: float) -> int:
    return 1 << (round(size) - 1).bit_length()
