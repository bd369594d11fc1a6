"""Types of the native module (csrc/bind*.cpp). Addresses are `tensor.data_ptr()`; 0 means absent."""

class Matrix:
    def __init__(
        self, format: str, rows: int, cols: int, source: int, fast_activations: bool = False, order: int = 0
    ) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def kind(self) -> str: ...

def quantize(from_: str, to: str, weights: int, source: int, target: int) -> None: ...

class LoraSlots:
    def __init__(self, slots: int, rows: int, cols: int) -> None: ...
    def set(self, slot: int, a: Matrix | None, b: Matrix | None) -> None: ...

class Attention:
    def __init__(
        self,
        *,
        query: Matrix,
        key: Matrix,
        value: Matrix,
        output: Matrix,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int,
        skip: int,
        causal: bool,
        anchored: bool,
        whole_norms: bool,
        scale: float,
        soft_cap: float,
        eps: float,
        norm: int = 0,
        post_norm: int = 0,
        query_norm: int = 0,
        key_norm: int = 0,
        query_bias: int = 0,
        key_bias: int = 0,
        value_bias: int = 0,
        output_bias: int = 0,
        key_factors: int = 0,
        sinks: int = 0,
        cos: int = 0,
        sin: int = 0,
        rope_positions: int = 0,
        gate: Matrix | None = None,
    ) -> None: ...
    def set_lora(self, query: LoraSlots, key: LoraSlots, value: LoraSlots, output: LoraSlots) -> None: ...

class Mlp:
    def __init__(
        self,
        *,
        gate: Matrix,
        up: Matrix,
        down: Matrix,
        activation: int,
        eps: float,
        norm: int = 0,
        post_norm: int = 0,
        gate_bias: int = 0,
        up_bias: int = 0,
        down_bias: int = 0,
    ) -> None: ...
    def set_lora(self, gate: LoraSlots, up: LoraSlots, down: LoraSlots) -> None: ...

class Moe:
    def __init__(
        self,
        *,
        router: Matrix,
        experts: list[Mlp],
        count: int,
        top_k: int,
        normalized: bool,
        eps: float,
        norm: int = 0,
        post_norm: int = 0,
        router_bias: int = 0,
    ) -> None: ...

class Recurrent:
    def __init__(
        self,
        *,
        channels: Matrix,
        controls: Matrix,
        gate: Matrix,
        output: Matrix,
        heads: int,
        key_heads: int,
        head_dim: int,
        state_dim: int,
        conv_size: int,
        delta: bool,
        eps: float,
        out_eps: float,
        norm: int = 0,
        out_norm: int,
        decay: int,
        step_bias: int,
        skip: int = 0,
        conv: int,
        conv_bias: int = 0,
    ) -> None: ...

class Batch:
    def __init__(
        self,
        *,
        positions: int,
        slots: int,
        query_starts: int,
        page_tables: int,
        parents: int,
        adapters: int,
        states: int,
        tokens: int,
        rows: int,
        table_width: int,
    ) -> None: ...
    @property
    def tokens(self) -> int: ...

class Pages:
    def __init__(
        self,
        *,
        keys: int,
        values: int,
        key_scales: int,
        value_scales: int,
        dtype: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
    ) -> None: ...

class States:
    def __init__(
        self, *, states: int, inputs: int, lengths: int, slots: int, lines: int, size: int, width: int
    ) -> None: ...

class LayerStack:
    def __init__(
        self, mixers: list[Attention | Recurrent], mlps: list[Mlp | Moe], storages: list[Pages | States], /
    ) -> None: ...

class SamplingMetadata:
    def __init__(
        self,
        *,
        temperature: int,
        top_k: int,
        top_p: int,
        min_p: int,
        seeds: int,
        positions: int,
        epochs: int,
        stream: int,
    ) -> None: ...

class VerifyInputs:
    def __init__(
        self,
        *,
        starts: int,
        tokens: int,
        parents: int,
        requests: int,
        rows: int,
        width: int,
        logits: int,
        drawn: int,
    ) -> None: ...

def expand_sampling(
    sampling: SamplingMetadata,
    drafts: VerifyInputs,
    temperature: int,
    top_k: int,
    top_p: int,
    min_p: int,
    seeds: int,
    positions: int,
    epochs: int,
    /,
) -> None: ...
def verify_exact(sampled: int, drafts: VerifyInputs, tokens: int, rows: int, counts: int, /) -> None: ...
def verify_synthetic(
    sampled: int, drafts: VerifyInputs, rates: int, sampling: SamplingMetadata, tokens: int, rows: int, counts: int, /
) -> None: ...
def verify_rejection(
    logits: int,
    vocabulary: int,
    drafts: VerifyInputs,
    sampling: SamplingMetadata,
    block: bool,
    with_replacement: bool,
    tokens: int,
    rows: int,
    counts: int,
    nonfinite: int,
    /,
) -> None: ...
def run_layers(stack: LayerStack, x: int, batch: Batch, /) -> None: ...
def embed(matrix: Matrix, tokens: int, count: int, scale: float, out: int, /) -> None: ...
def linear(matrix: Matrix, x: int, tokens: int, out: int, /) -> None: ...
def rms_norm(x: int, weight: int, eps: float, tokens: int, width: int, out: int, /) -> None: ...
def soft_cap(x: int, cap: float, rows: int, width: int, /) -> None: ...
def norm_linear(matrix: Matrix, x: int, weight: int, eps: float, tokens: int, out: int, /) -> None: ...
def mlp(layer: Mlp, x: int, tokens: int, adapters: int, /) -> None: ...
def moe(layer: Moe, x: int, tokens: int, /) -> None: ...
def recurrent(layer: Recurrent, x: int, batch: Batch, states: States) -> None: ...
def copy_inputs(layers: list[States], sources: int, targets: int, count: int) -> None: ...
def project_qkv(layer: Attention, x: int, batch: Batch, pages: Pages, q: int, /) -> None: ...
def project_kv(layer: Attention, x: int, batch: Batch, pages: Pages, /) -> None: ...
def attend(layer: Attention, q: int, batch: Batch, pages: Pages, x: int, /) -> None: ...
def copy_kv(pages: list[Pages], sources: int, targets: int, count: int, /) -> None: ...
def process_logits(
    logits: int, rows: int, vocabulary: int, entries: int, starts: int, tokens: int, scale: int, bias: int, only: int, /
) -> None: ...
def mask_logits(logits: int, rows: int, vocabulary: int, masks: int, row_ids: int, count: int, /) -> None: ...
def sample(logits: int, rows: int, vocabulary: int, sampling: SamplingMetadata, out: int, /) -> None: ...
def sample_children(
    logits: int, rows: int, vocabulary: int, sampling: SamplingMetadata, count: int, tokens: int, logprobs: int, /
) -> None: ...
def top_logprobs(
    logits: int,
    rows: int,
    vocabulary: int,
    tokens: int,
    count: int,
    chosen: int,
    rank: int,
    values: int,
    ids: int,
    /,
) -> None: ...
def next_tokens(
    chosen: int,
    rows: int,
    columns: int,
    drafted: int,
    query_starts: int,
    backup: int,
    discard: int,
    vocabulary: int,
    tokens: int,
    counts: int,
    rejected: int,
    ends: int,
    /,
) -> None: ...
def draft_inputs(
    tokens: int,
    positions: int,
    query_starts: int,
    ends: int,
    newest: int,
    rows: int,
    count: int,
    extra: int,
    shift: bool,
    mask: int,
    out_tokens: int,
    out_positions: int,
    out_query_starts: int,
    samples: int,
    sources: int,
    rejected: int,
    /,
) -> None: ...
def block_inputs(
    positions: int,
    query_starts: int,
    ends: int,
    newest: int,
    rows: int,
    count: int,
    page_tables: int,
    table_width: int,
    page_size: int,
    limit: int,
    masks: int,
    mask: int,
    context_slots: int,
    tokens: int,
    out_positions: int,
    slots: int,
    out_query_starts: int,
    /,
) -> None: ...
def next_slots(
    positions: int,
    page_tables: int,
    rows: int,
    table_width: int,
    page_size: int,
    limit: int,
    count: int,
    following: int,
    slots: int,
    /,
) -> None: ...
def stream_read(address: int, bytes: int, /) -> int: ...
def busy_seconds() -> float: ...
def level_name() -> str: ...
def available_levels() -> list[str]: ...
def choose_level(name: str) -> None: ...
def thread_count() -> int: ...
def set_thread_count(count: int) -> None: ...

_Operand = tuple[int, int, int, int, int]  # address, value, bytes of an element, strides of rows and columns

class Recording:
    @property
    def missing(self) -> int: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def copy(
        self,
        target: int,
        source: int,
        sizes: list[int],
        target_strides: list[int],
        source_strides: list[int],
        item: int,
        /,
    ) -> None: ...
    def copy_rows(self, target: int, source: int, indices: int, count: int, limit: int, bytes: int, /) -> None: ...
    def scatter(self, target: int, source: int, columns: int, rows: int, count: int, width: int, /) -> None: ...
    def fill(self, target: int, value: float, count: int, /) -> None: ...
    def sigmoid(self, target: int, source: int, count: int, /) -> None: ...
    def clear(self, target: int, bytes: int, /) -> None: ...
    def add(self, target: int, left: int, right: int, rows: int, columns: int, right_rows: int, /) -> None: ...
    def scale(self, target: int, source: int, factor: float, count: int, /) -> None: ...
    def integers(
        self,
        name: str,
        rows: int,
        columns: int,
        out: _Operand,
        a: _Operand,
        b: _Operand,
        c: _Operand,
        /,
    ) -> None: ...
    def put_rows(self, target: int, source: int, indices: int, count: int, limit: int, bytes: int, /) -> None: ...
    def choose_rows(self, target: int, flags: int, chosen: int, other: int, rows: int, columns: int, /) -> None: ...
    def end_depth(self, estimate: int, is_logprob: bool, /) -> None: ...
    def replay(self, limit: int, least: float, shared_noise: bool, /) -> int: ...

def copy_bytes(target: int, source: int, bytes: int, /) -> None: ...
