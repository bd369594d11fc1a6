"""Choose how many tokens to draft from measured latencies and acceptance rates."""

from .catch_up import CatchUpBuffers
from .controller import AdaptiveController

__all__ = ["AdaptiveController", "CatchUpBuffers"]
