"""Every operation on an NVIDIA GPU: Triton kernels, and cuBLAS where a step has many rows.

Nothing here waits for the device and no shape depends on data, so that whole steps can be recorded as graphs. Tokens
and rows that pad a recorded shape give results that nobody reads; a slot of -1 is never written.
"""

from __future__ import annotations

from .attention import attend as attend
from .attention import attention_layer as attention_layer
from .attention import project_kv as project_kv
from .attention import project_qkv as project_qkv
from .matrices import matrix as matrix
from .mlp import mlp as mlp
from .mlp import mlp_layer as mlp_layer
from .place import PLACE as PLACE
from .place import vector as vector
from .places import move as move
from .pointwise import embed as embed
from .pointwise import rms_norm as rms_norm
from .prepare import advance as advance
from .prepare import block_inputs as block_inputs
from .prepare import draft_inputs as draft_inputs
from .prepare import settle as settle
from .product import linear as linear
from .product import norm_linear as norm_linear
from .reject import reject as reject
from .report import edit_logits as edit_logits
from .report import mask_logits as mask_logits
from .report import top_logprobs as top_logprobs
from .sample import branch as branch
from .sample import sample as sample
from .stack import run_stack as run_stack
from .stack import stack as stack
from .verify import expand as expand
from .verify import force as force
from .verify import match as match
