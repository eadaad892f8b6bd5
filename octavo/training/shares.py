"""How ranks share a step: the same sequences on any number of ranks, equally many on each.

    S = batch · micro_batches / ranks        sequences of a rank in a step
    count ≥ S / batch, count divides S       its micro-batches: as few as hold no more than `batch` sequences each

So `batch` bounds what a GPU holds at once, `batch · micro_batches` is what a step learns from, and with one rank the
count is `micro_batches`.
"""


def check_shares(batch: int, micro_batches: int, ranks: int) -> None:
    """Raise if a step cannot be shared equally."""
    if batch * micro_batches % ranks:
        raise ValueError(
            f"batch={batch}: the {batch * micro_batches} of a step cannot be shared equally by {ranks} ranks; give "
            f"--batch a multiple of {ranks}"
        )


def own_micro_batches(batch: int, micro_batches: int, ranks: int) -> int:
    """Return the number of micro-batches of one rank in a step."""
    share = batch * micro_batches // ranks
    return next(count for count in range(-(-share // batch), share + 1) if share % count == 0)
