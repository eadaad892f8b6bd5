"""Triton kernels for the work between the products of a BDH layer; `octavo/models/bdh/spec.py` specifies them."""
