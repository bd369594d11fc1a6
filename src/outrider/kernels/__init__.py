"""Operations on tensors: one protocol, and one package for each backend."""

from __future__ import annotations

from .protocol import Kernels as Kernels
from .protocol import load as load
from .recurrence import LayerStates as LayerStates
from .recurrence import RecurrentWeights as RecurrentWeights
from .structures import Activation as Activation
from .structures import AttentionLora as AttentionLora
from .structures import AttentionWeights as AttentionWeights
from .structures import Batch as Batch
from .structures import BlockInputs as BlockInputs
from .structures import ChildTokens as ChildTokens
from .structures import DecodeProcessors as DecodeProcessors
from .structures import DraftInputs as DraftInputs
from .structures import LayerPages as LayerPages
from .structures import LogitsProcessors as LogitsProcessors
from .structures import MlpLora as MlpLora
from .structures import MlpWeights as MlpWeights
from .structures import MoeWeights as MoeWeights
from .structures import NextTokens as NextTokens
from .structures import NgramLookup as NgramLookup
from .structures import SamplingMetadata as SamplingMetadata
from .structures import TokenHistory as TokenHistory
from .structures import TopLogprobs as TopLogprobs
from .structures import VerifyInputs as VerifyInputs
from .structures import VerifyOutput as VerifyOutput
from .structures import Weight as Weight
from .structures import WindowMap as WindowMap
