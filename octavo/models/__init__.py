"""Models that ship with Octavo, written from their equations, with nothing about FP8 in them."""

from octavo.models.bdh import BDH, BDHConfig

__all__ = ["BDH", "BDHConfig"]
