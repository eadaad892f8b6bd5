"""`octavo plan --gpus N`: memory of a rank, bytes on the wire and time of a step on N GPUs, on paper.

    assumptions.py  bandwidths, slow-down and rates: all that is not computed from the model
    ways.py         precision, gather and reduce: the ways that are compared, for each strategy
    units.py        tensors that are gathered and reduced together: embedding, each layer, head
    wire.py         bytes that a rank sends in a step, by collective
    memory.py       the plan of one GPU, divided by the strategy
    schedule.py     computing and communication beside each other, unit by unit
    step.py         time of a step from all of it
    request.py      what a person asks for, checked
    plan.py         every way at every number of GPUs, and which to choose
    show.py         on the terminal, and as JSON

Bytes are exact: `tests/dist/test_plan_bytes.py` counts them on local ranks. Times are no measurements. Nothing here has
been compared with more than one GPU: ratios between rows mean more than milliseconds.
"""
