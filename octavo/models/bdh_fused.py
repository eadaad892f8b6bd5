"""The documented import path of BDH's `fuse`; the code is in `octavo/models/bdh`."""

from octavo.models.bdh.fused import FusedBDH, fuse, is_fused, unfuse

__all__ = ["FusedBDH", "fuse", "is_fused", "unfuse"]
