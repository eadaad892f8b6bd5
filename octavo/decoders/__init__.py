"""Fused pieces for the decoders of transformers: one product for q, k and v, one function for the MLP, a chunked loss.

A module keeps its identity, its Parameters and its state-dict keys: only its class changes, to a subclass that computes
the same with fewer passes over memory, and `restore` changes it back. A call that a piece cannot serve goes to the
original class: a projection that PEFT has wrapped, labels that are not there, a cache that is being filled.

    match        which module is what, and why a piece of a model cannot be fused
    fuse         one driver for trained and frozen weights; it writes what it did into the model's report
    forwards     attention, MLP, norm and layer, as they compute when fused
    products     a group of linears, a gated MLP: trained, or frozen in FP8 with adapters
    causal_lm    head and cross entropy in chunks of tokens: while training, the model returns the loss and no logits
    backbone     the layers of a model: with CUDA graphs, without padding, or as they were called
    ragged       batches without padding: real tokens of all rows as one row, and where sequences begin
    attention    one front for rows of one length and for sequences of any length
    graphs       the layers recorded as CUDA graphs
    hooks        modules that are called as themselves because somebody watches them
"""
