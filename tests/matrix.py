"""Of a test with many parameters, `make test` runs a sample: what is not in it is marked as slow.

A test with `@pytest.mark.matrix` is a matrix of all combinations of its parameters. `@pytest.mark.matrix("a", "b")` has
every pair of values of `a` and `b` in its sample as well.
"""

from collections import Counter


def mark_all_but_samples(items):
    matrices = {}
    for item in items:
        if item.get_closest_marker("matrix"):
            matrices.setdefault((item.path, item.originalname), []).append(item)
    for cells in matrices.values():
        sample = sampled(cells)
        for item in cells:
            if item not in sample:
                item.add_marker("slow")


def sampled(cells):
    """Choose cells of a matrix in which each value of each `parametrize` occurs, and each pair that its mark names."""
    named = [mark.args[0] for mark in cells[0].iter_markers("parametrize")]
    named = [tuple(names.replace(" ", "").split(",")) if isinstance(names, str) else tuple(names) for names in named]
    named.append(cells[0].get_closest_marker("matrix").args)
    wanted = {}
    for item in cells:
        values = item.callspec.params
        wanted[item] = {tuple((name, id(values[name])) for name in names) for names in named}  # lists have no hash
    missing, actual, times = set().union(*wanted.values()), [], Counter()
    while missing:  # with the cell that has most of them; of several, the one whose values are rarest so far
        cell = max(cells, key=lambda item: (len(wanted[item] & missing), -sum(times[value] for value in wanted[item])))
        actual.append(cell)
        times.update(wanted[cell])
        missing -= wanted[cell]
    return actual
