"""Memory of head and loss: a vocabulary of 100,000 words by every token, often the peak of a step.

Letters: M tokens, K width, V vocabulary. Bytes at the largest moment, by kind.

    Hugging Face   backward of the loss has three FP32 tensors [M, V]: log-probabilities and two gradients
    Octavo         chunks of tokens (`nn/loss.py`): the logits of one, beside the gradient of the head so far, in FP32
                   if there are several
    FP8 head       the head twice in FP8; logits of a chunk, their gradient in FP8 as rows and, for dw, as columns
"""

from octavo.nn.loss import CHUNK_BYTES, FROZEN_CHUNK_BYTES, chunk_bounds
from octavo.tools.plan.layer import BF16, FP32
from octavo.tools.plan.options import Option
from octavo.tools.shapes import Case


def head_bytes(case: Case, option: Option) -> dict[str, int]:
    """Return activations, gradients and buffers at the head's peak, besides what the layers save."""
    m, k, v = case.tokens, case.config["hidden_size"], case.vocabulary
    rows = m * k * option.weight_bytes
    if option.code == "hf":
        # The norm's input in FP32; if they are trained, also the inputs of the norm's weight and of the head.
        norm = m * k * FP32 + (0 if case.frozen else 2 * rows)
        return {"activations": norm, "gradients": 0, "buffers": 3 * m * v * FP32}
    norm = (2 if case.frozen else 3) * rows  # its input, its output; normed without weights
    chunks = _fp8_chunks if option.fp8_head else _bf16_chunks
    gradients, buffers = chunks(case, option)
    return {"activations": norm, "gradients": gradients, "buffers": buffers + rows}  # rows: the gradient of its input


def _bf16_chunks(case: Case, option: Option) -> tuple[int, int]:
    m, k, v = case.tokens, case.config["hidden_size"], case.vocabulary
    bounds = chunk_bounds(0, m, v * BF16, FROZEN_CHUNK_BYTES if case.frozen else CHUNK_BYTES)
    longest = max(stop - start for start, stop in bounds)
    logits = longest * v * BF16
    if case.frozen:
        return 0, logits
    dw = v * k * option.weight_bytes
    if option.weight_bytes == FP32:  # dw is the sum itself; the head and a chunk's tokens in BF16 beside it
        return dw, logits + (v + longest) * k * BF16
    sums = v * k * FP32 if len(bounds) > 1 else 0
    # With each chunk's logits; then rounded, when there are none.
    return dw, max(sums + logits, dw + sums) - dw if sums else logits


def _fp8_chunks(case: Case, option: Option) -> tuple[int, int]:
    """Return bytes of dw and of buffers. Groups of tokens share one product for dw; each is computed in chunks."""
    m, k, v = case.tokens, case.config["hidden_size"], case.vocabulary
    trained = not case.frozen
    groups = chunk_bounds(0, m, v, CHUNK_BYTES)
    logit_bytes = CHUNK_BYTES // 2 if trained else FROZEN_CHUNK_BYTES
    chunks = [each for begin, end in groups for each in chunk_bounds(begin, end, v * BF16, logit_bytes)]
    group, chunk = (max(stop - start for start, stop in bounds) for bounds in (groups, chunks))
    rows, columns = chunk * v, group * v * trained
    dw = v * k * option.weight_bytes * trained
    sums = v * k * FP32 * trained if len(groups) > 1 else 0
    # Gradient so far and buffers at each point; a variable lives until it is reassigned.
    in_chunk = sums + columns + chunk * v * BF16 + rows * min(len(chunks), 2)
    at_product = sums + columns + rows + group * k * trained + dw
    return dw, max(in_chunk, at_product, sums + dw + rows) - dw + 2 * v * k + m * k
