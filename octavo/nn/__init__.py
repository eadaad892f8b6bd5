"""Layers and the autocast: FP8 where models multiply."""
