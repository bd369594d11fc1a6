"""Choose how many tokens to draft from measured latencies and acceptance rates."""

from .controller import AdaptiveController

__all__ = ["AdaptiveController"]
