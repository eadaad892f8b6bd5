"""`octavo plan`: how much memory a training step takes, before anything runs, from the configuration alone.

    request.py    what a person asks for, checked
    options.py    the ways to train that are compared
    layer.py      what a decoder layer saves for its backward
    head.py       head and loss
    persistent.py weights, gradients, optimiser states
    host.py       states and master weights that are in host memory
    memory.py     the moments of a step, and the peak: the largest of them (`timeline.py`)
    gpus.py       GPUs by name, with their memory and their compute capability
    fits.py       the largest batch and the longest sequence that fit one
    advice.py     which option to take, the code that runs it, and claims that cannot hold
    show.py       on the terminal, and as JSON
    run.py        all of it in order
    scale/        `--gpus N`: memory, bytes on the wire and time on several GPUs

Each figure is the size of tensors that the code makes; no factor is fitted. `tests/tools/test_plan_layer.py` counts
what layers save, `tests/tools/test_plan_step.py` what is allocated in whole steps on a CPU, and
`tests/tools/test_plan_measured.py` compares peaks with those that `octavo bench` measured. Which tensors are there at a
peak was found with those measurements at hand: shapes and options that they lack are predictions.
"""
