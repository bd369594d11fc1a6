"""Every operation on an NVIDIA GPU: Triton kernels, and cuBLAS where a step has many rows.

Nothing here waits for the device and no shape depends on data, so that whole steps can be recorded as graphs. Tokens
and rows that pad a recorded shape give results that nobody reads; a slot of -1 is never written.
"""

from __future__ import annotations

from .device import DEVICE as DEVICE
from .device import vector as vector
from .drafter_inputs import advance as advance
from .drafter_inputs import block_inputs as block_inputs
from .drafter_inputs import draft_inputs as draft_inputs
from .drafter_inputs import settle as settle
from .kv_copy import move as move
from .layers import attend as attend
from .layers import attention_layer as attention_layer
from .layers import mlp as mlp
from .layers import mlp_layer as mlp_layer
from .layers import project_kv as project_kv
from .layers import project_qkv as project_qkv
from .layers import run_stack as run_stack
from .layers import stack as stack
from .logits import edit_logits as edit_logits
from .logits import mask_logits as mask_logits
from .logits import top_logprobs as top_logprobs
from .matmul import linear as linear
from .matmul import norm_linear as norm_linear
from .matrices import matrix as matrix
from .pointwise import embed as embed
from .pointwise import rms_norm as rms_norm
from .rejection import reject as reject
from .sampling import branch as branch
from .sampling import sample as sample
from .verification import expand as expand
from .verification import force as force
from .verification import match as match
