"""Faster ways to compute what `octavo/numerics` specifies, on GPUs with FP8 tensor cores."""
