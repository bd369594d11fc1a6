"""Choose how many tokens to draft from measured latencies and acceptance rates."""

from .controller import AdaptiveController
from .suspension import CatchUpBuffers

__all__ = ["AdaptiveController", "CatchUpBuffers"]
