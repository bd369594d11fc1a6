"""The CUDA backend: Triton kernels, and cuBLAS for steps with many rows.

No operation waits for the device and no shape depends on data, so that CUDA graphs can capture whole steps. Results of
padding tokens and rows are unused; a slot of -1 is never written.
"""

from __future__ import annotations

from .device import DEVICE as DEVICE
from .device import record as record
from .device import vector as vector
from .drafter_inputs import block_inputs as block_inputs
from .drafter_inputs import draft_inputs as draft_inputs
from .drafter_inputs import next_slots as next_slots
from .drafter_inputs import next_tokens as next_tokens
from .kv_copy import copy_kv as copy_kv
from .layers import attend as attend
from .layers import attention_layer as attention_layer
from .layers import layer_stack as layer_stack
from .layers import mlp as mlp
from .layers import mlp_layer as mlp_layer
from .layers import project_kv as project_kv
from .layers import project_qkv as project_qkv
from .layers import run_layers as run_layers
from .lookup import ngram_drafts as ngram_drafts
from .lora import lora_slots as lora_slots
from .lora import set_lora as set_lora
from .matmul import linear as linear
from .matmul import norm_linear as norm_linear
from .matrices import matrix as matrix
from .moe import moe as moe
from .moe import moe_layer as moe_layer
from .pointwise import embed as embed
from .pointwise import rms_norm as rms_norm
from .pointwise import soft_cap as soft_cap
from .processors import count_tokens as count_tokens
from .processors import process_decode_logits as process_decode_logits
from .recurrent import copy_inputs as copy_inputs
from .recurrent import recurrent as recurrent
from .recurrent import recurrent_layer as recurrent_layer
from .rejection import verify_rejection as verify_rejection
from .sampling import mask_logits as mask_logits
from .sampling import process_logits as process_logits
from .sampling import sample as sample
from .sampling import sample_children as sample_children
from .sampling import top_logprobs as top_logprobs
from .verification import expand_sampling as expand_sampling
from .verification import verify_exact as verify_exact
from .verification import verify_synthetic as verify_synthetic
