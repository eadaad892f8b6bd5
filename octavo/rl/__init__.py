"""Reinforcement learning on one copy of FP8 weights: the trainer owns them, an engine owns a cache."""

from octavo.rl.attach import attach, attached, detach, fallbacks
from octavo.rl.completions import Completion, Engine, Sampling
from octavo.rl.engine import NativeEngine

__all__ = ["Completion", "Engine", "NativeEngine", "Sampling", "attach", "attached", "detach", "fallbacks"]
