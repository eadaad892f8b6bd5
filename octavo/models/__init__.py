"""Models that ship with Octavo, each in a folder of its own that can be removed as a whole."""

from octavo.models.bdh import BDH, BDHConfig

__all__ = ["BDH", "BDHConfig"]
