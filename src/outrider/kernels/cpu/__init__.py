"""The CPU backend: checks arguments, allocates results, and passes addresses to the native library.

Layers are checked when they are built. A call checks shapes here, and the native code checks the values that would
cause an out-of-bounds access: positions, slots, page tables, rows and tokens.
"""

from __future__ import annotations

from .drafter_inputs import block_inputs as block_inputs
from .drafter_inputs import draft_inputs as draft_inputs
from .drafter_inputs import next_slots as next_slots
from .drafter_inputs import next_tokens as next_tokens
from .layers import attend as attend
from .layers import attention_layer as attention_layer
from .layers import copy_kv as copy_kv
from .layers import embed as embed
from .layers import linear as linear
from .layers import lora_slots as lora_slots
from .layers import matrix as matrix
from .layers import mlp as mlp
from .layers import mlp_layer as mlp_layer
from .layers import moe as moe
from .layers import moe_layer as moe_layer
from .layers import norm_linear as norm_linear
from .layers import project_kv as project_kv
from .layers import project_qkv as project_qkv
from .layers import rms_norm as rms_norm
from .layers import set_lora as set_lora
from .layers import soft_cap as soft_cap
from .layers import vector as vector
from .lookup import ngram_drafts as ngram_drafts
from .processors import count_tokens as count_tokens
from .processors import process_decode_logits as process_decode_logits
from .quantize import quantize_weight as quantize_weight
from .recording import record as record
from .recurrent import copy_inputs as copy_inputs
from .recurrent import recurrent as recurrent
from .recurrent import recurrent_layer as recurrent_layer
from .runtime import Facts as Facts
from .runtime import busy_seconds as busy_seconds
from .runtime import facts as facts
from .runtime import fast_by_default as fast_by_default
from .runtime import set_threads as set_threads
from .runtime import stream_read as stream_read
from .sampling import expand_sampling as expand_sampling
from .sampling import mask_logits as mask_logits
from .sampling import process_logits as process_logits
from .sampling import sample as sample
from .sampling import sample_children as sample_children
from .sampling import top_logprobs as top_logprobs
from .sampling import verify_exact as verify_exact
from .sampling import verify_rejection as verify_rejection
from .sampling import verify_synthetic as verify_synthetic
from .stack import layer_stack as layer_stack
from .stack import run_layers as run_layers
