"""Training on several ranks: shared scales, FP8 on the wire, tensor parallelism, checkpoints of shards.

Importing it does not import `torch.distributed.fsdp` or any engine: the functions that need one import it.
"""
