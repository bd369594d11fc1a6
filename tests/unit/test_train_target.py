"""TargetModel computes each document as the model does alone, and zeros for padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_writer import Q4_0, Q8_0, Tensor, gguf
from torch import nn

import tiny
from backends import backends
from outrider.errors import UserError
from outrider.kernels import Weight
from outrider.kernels.quantization import dequantize
from outrider.train.data.pack import Pack
from outrider.train.target import TargetModel, layout_of
from refusals import refusal

LENGTHS = [[9, 4, 7], [17, 1], [], [24], [5]]  # of the documents in each row
ROW = 24
AUX_LAYERS = (0, 2, 3)
COUNTS = torch.ones(tiny.VOCABULARY, dtype=torch.int64)


def packed(rows: list[list[list[int]]], length: int) -> Pack:
    tokens, positions = torch.zeros(2, len(rows), length, dtype=torch.int64)
    documents = torch.full((len(rows), length), -1)
    for row, texts in enumerate(rows):
        begin = 0
        for number, text in enumerate(texts):
            end = begin + len(text)
            tokens[row, begin:end], positions[row, begin:end] = torch.tensor(text), torch.arange(len(text))
            documents[row, begin:end], begin = number, end
    return Pack(tokens, positions, documents, positions > 2)


def texts_of(lengths: list[list[int]]) -> list[list[list[int]]]:
    return [[tiny.prompt(size, seed=10 * row + n) for n, size in enumerate(sizes)] for row, sizes in enumerate(lengths)]


TEXTS = texts_of(LENGTHS)


@pytest.fixture(scope="module", params=backends("cpu", "reference"))
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def target_of(name: str, backend: str, tokens: int = 1000) -> TargetModel:
    return TargetModel(str(tiny.folder(name)), backend, tokens=tokens)


def assert_near(actual: torch.Tensor, wanted: torch.Tensor, limit: float = 1e-4) -> None:
    torch.testing.assert_close(actual.cpu(), wanted, atol=limit, rtol=0)


def spans(lengths: list[list[int]]) -> list[tuple[int, int, slice]]:
    """Return row, number and span of each document."""
    return [
        (row, n, slice(sum(sizes[:n]), sum(sizes[: n + 1])))
        for row, sizes in enumerate(lengths)
        for n in range(len(sizes))
    ]


@pytest.mark.parametrize(("name", "tokens"), [("llama", 1000), ("llama", 1), ("mistral", 10), ("gemma3", 50)])
def test_documents_are_computed_independently(name: str, tokens: int, backend: str) -> None:
    target_model = target_of(name, backend, tokens)
    outputs = target_model.forward(packed(TEXTS, ROW), AUX_LAYERS)
    assert set(outputs.aux_states) == set(AUX_LAYERS)
    model = tiny.original(name)
    for row, number, span in spans(LENGTHS):
        with torch.no_grad():
            alone = model(torch.tensor([TEXTS[row][number]]), output_hidden_states=True)
        assert_near(outputs.logits[row, span], alone.logits[0])
        assert_near(outputs.last_state[row, span], alone.hidden_states[-1][0])
        for aux_layer in (aux_layer for aux_layer in AUX_LAYERS if aux_layer < model.config.num_hidden_layers):
            assert_near(outputs.aux_states[aux_layer][row, span], alone.hidden_states[aux_layer][0])


@pytest.mark.parametrize("tokens", [1000, 10])
def test_a_document_has_the_same_bits_in_any_pack(tokens: int) -> None:
    target_model = target_of("qwen2", "cpu", tokens)
    whole = target_model.forward(packed(TEXTS, ROW), AUX_LAYERS)
    kept = {**whole.aux_states, "last": whole.last_state, "logits": whole.logits.clone()}
    for row, number, span in spans(LENGTHS):
        text = TEXTS[row][number]
        alone = target_model.forward(packed([[text]], len(text)), AUX_LAYERS)
        for key, found in {**alone.aux_states, "last": alone.last_state, "logits": alone.logits}.items():
            assert torch.equal(found[0], kept[key][row, span])


def test_the_bits_are_those_of_the_model() -> None:
    """Prompts in pieces, in small pages that lie anywhere: as an engine would run them."""
    target_model = target_of("smollm3", "cpu")
    model, aux_layers = target_model.model, (0, 2, 5)
    outputs = target_model.forward(packed(TEXTS, ROW), aux_layers)
    for row, number, span in spans(LENGTHS):
        logits, states = tiny.run(model, TEXTS[row][number], 7, aux_layers)
        assert torch.equal(outputs.logits[row, span], logits)
        assert torch.equal(outputs.last_state[row, span], model.ops.rms_norm(states[-1], model.norm, model.config.eps))
        for aux_layer, state in zip(aux_layers, states, strict=True):
            assert torch.equal(outputs.aux_states[aux_layer][row, span], state)


def test_padding_is_zeros(backend: str) -> None:
    target_model = target_of("llama", backend)
    target_model.forward(packed(texts_of([[24]] * 5), ROW), AUX_LAYERS)  # leaves logits behind
    pack = packed(TEXTS, ROW)
    outputs = target_model.forward(pack, AUX_LAYERS)
    empty = pack.documents < 0
    assert empty.sum() == 5 * ROW - sum(map(sum, LENGTHS))
    for values in (*outputs.aux_states.values(), outputs.last_state, outputs.logits):
        assert not values.cpu()[empty].any()
        assert values.cpu()[~empty].any(-1).all()


def test_an_empty_pack_has_zero_logits(backend: str) -> None:
    outputs = target_of("llama", backend).forward(packed([[], []], 4), AUX_LAYERS)
    assert outputs.logits.shape == (2, 4, tiny.VOCABULARY)
    assert not outputs.logits.any()


def test_target_outputs_are_fp32_and_have_their_pack(backend: str) -> None:
    target_model = target_of("llama", backend)
    pack = packed(TEXTS, ROW)
    outputs = target_model.forward(pack, [3, 1, 3])
    assert sorted(outputs.aux_states) == [1, 3]
    assert torch.equal(outputs.pack.tokens.cpu(), pack.tokens)
    for values in (*outputs.aux_states.values(), outputs.last_state, outputs.logits, outputs.pack.tokens):
        assert values.device.type == target_model.device.torch_device.type
        assert values.shape[:2] == (5, ROW)
    assert outputs.logits.shape[2] == tiny.VOCABULARY
    assert {values.dtype for values in (*outputs.aux_states.values(), outputs.last_state, outputs.logits)} == {
        torch.float32
    }


def test_heads_can_train_on_target_outputs() -> None:
    outputs = target_of("llama", "cpu").forward(packed(TEXTS, ROW), AUX_LAYERS)
    draft_head = nn.Linear(64, 1)
    (draft_head(outputs.aux_states[2]) + draft_head(outputs.last_state)).sum().backward()
    assert draft_head.weight.grad is not None and draft_head.weight.grad.any()
    assert not outputs.logits.requires_grad


def test_logits_are_optional_and_share_one_buffer(backend: str) -> None:
    target_model = target_of("llama", backend)
    bare = target_model.forward(packed(TEXTS, ROW), AUX_LAYERS, with_logits=False)
    assert bare.logits.shape == (5, ROW, 0)
    large = target_model.forward(packed(TEXTS, ROW), AUX_LAYERS)
    assert_near(bare.last_state, large.last_state.cpu(), 0)
    small = target_model.forward(packed(TEXTS[:2], ROW), AUX_LAYERS)
    assert small.logits.data_ptr() == large.logits.data_ptr()


def test_documents_do_not_see_each_other(backend: str) -> None:
    target_model = target_of("llama", backend)
    changed = [[[*text] for text in row] for row in TEXTS]
    changed[0][0] = tiny.prompt(9, seed=99)

    def seen(texts: list[list[list[int]]]) -> torch.Tensor:
        return target_model.forward(packed(texts, ROW), ()).logits.clone()

    apart = (seen(TEXTS) != seen(changed)).any(-1).cpu()  # [B, L]
    assert apart[0, :9].any()
    assert not apart[0, 9:].any() and not apart[1:].any()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_target_info_has_the_matrices_of_the_model(name: str, backend: str) -> None:
    model = tiny.original(name)
    target_info = target_of(name, backend).info(COUNTS)
    enters = model.model.embed_tokens(torch.arange(tiny.VOCABULARY)).detach()  # Gemma's is scaled
    assert_near(target_info.embedding, enters, 1e-6)
    assert_near(target_info.lm_head, model.lm_head.weight.detach(), 0)
    assert (target_info.lm_head is target_info.embedding) == (name == "qwen3")
    assert target_info.embedding.dtype == target_info.lm_head.dtype == torch.float32
    assert target_info.aux_layers == {"llama": (1, 2, 3), "qwen3": (1, 2, 3), "gemma3": (2, 3, 4)}[name]
    assert target_info.token_counts is COUNTS
    assert target_info.config.vocabulary == tiny.VOCABULARY


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_target_outputs_agree_with_target_info(name: str, backend: str) -> None:
    target_model = target_of(name, backend)
    target_info = target_model.info(COUNTS)
    outputs = target_model.forward(packed(TEXTS, ROW), (0,))
    live = outputs.pack.documents >= 0
    assert_near(outputs.aux_states[0][live], target_info.embedding[outputs.pack.tokens[live]].cpu(), 1e-6)
    assert_near(outputs.logits[live], (outputs.last_state[live] @ target_info.lm_head.T).cpu())


KINDS = {"q8_0": Q8_0, "q4_0": Q4_0}


def quantized(path: Path, kind: str) -> dict[str, Weight]:
    """A GGUF file of one layer whose matrices are all of one kind, embedding and head among them."""
    draws = np.random.default_rng(4)
    made: dict[str, Weight] = {}
    tensors = []

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            tensors.append(Tensor(name, shape, draws.normal(1, 0.1, shape).astype(np.float32).tobytes()))
            return
        blocks = shape[0] * shape[1] // 32
        scales = draws.uniform(0.001, 0.003 if kind == "q8_0" else 0.03, (blocks, 1)).astype(np.float16)
        quants = draws.integers(0, 256, (blocks, 32 if kind == "q8_0" else 16), np.uint8)
        content = np.concatenate([scales.view(np.uint8), quants], 1)
        tensors.append(Tensor(name, shape, content.tobytes(), KINDS[kind]))
        made[name] = Weight(kind, shape, torch.from_numpy(content.reshape(shape[0], -1)))

    width, inner, vocabulary = 64, 96, 40
    for name in ("token_embd", "output"):
        add(f"{name}.weight", vocabulary, width)
    add("output_norm.weight", width)
    for name, outputs, inputs in (
        ("attn_q", 64, width), ("attn_k", 32, width), ("attn_v", 32, width), ("attn_output", width, 64),
        ("ffn_gate", inner, width), ("ffn_up", inner, width), ("ffn_down", width, inner),
    ):  # fmt: skip
        add(f"blk.0.{name}.weight", outputs, inputs)
    for name in ("attn_norm", "ffn_norm"):
        add(f"blk.0.{name}.weight", width)
    fields = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": width,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.eos_token_id": 2,
    }
    path.write_bytes(gguf(fields, tensors))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_matrices_are_what_the_kernels_multiply(kind: str, backend: str, tmp_path: Path) -> None:
    made = quantized(tmp_path / "m.gguf", kind)
    target_model = TargetModel(str(tmp_path / "m.gguf"), backend)
    target_info = target_model.info(torch.ones(40, dtype=torch.int64))
    limit = 1e-3 if backend == "cuda" else 0  # there they are rounded to bf16
    assert_near(target_info.embedding, dequantize(made["token_embd.weight"]), limit)
    assert_near(target_info.lm_head, dequantize(made["output.weight"]), limit)
    assert target_info.aux_layers == (1,)
    outputs = target_model.forward(packed([[[3, 9, 30], [5]]], 5), (0,))
    assert_near(outputs.aux_states[0][0, :4], target_info.embedding[[3, 9, 30, 5]].cpu(), 0)
    wanted = outputs.last_state @ target_info.lm_head.T
    assert wanted.std() > 0.3
    assert_near(outputs.logits, wanted.cpu(), 0.03 * float(wanted.std()))  # activations have 8 bits


def refused(target_model: TargetModel, pack: Pack) -> str:
    return refusal(lambda: target_model.forward(pack, ()))


def test_answers_of_another_model_are_refused() -> None:
    target_model = target_of("llama", "cpu")
    assert f"token {tiny.VOCABULARY}," in refused(target_model, packed([[[3, tiny.VOCABULARY]]], 4))
    assert "trained for 128" in refused(target_model, packed([[[3] * 129]], 130))
    target_model.forward(packed([[[3] * 128]], 130), ())
    with pytest.raises(UserError, match="`tokens` is 0"):
        TargetModel("some", tokens=0)


def test_pages_of_a_document_are_its_own() -> None:
    plan = layout_of(packed(TEXTS, ROW), 4)
    assert plan.pages == sum(-(-size // 4) for sizes in LENGTHS for size in sizes)
    assert len(set(plan.slots.tolist())) == len(plan.slots) == sum(map(sum, LENGTHS))
    for document, (begin, end) in enumerate(zip(plan.starts, plan.starts[1:], strict=False)):
        pages = plan.slots[begin:end] // 4
        assert np.array_equal(pages - plan.first_pages[document], plan.positions[begin:end] // 4)
    assert plan.width == 6


def test_pages_grow_with_the_packs(backend: str) -> None:
    target_model = target_of("llama", backend)
    first = target_model.forward(packed([[tiny.prompt(3)]], 3), (1,))
    few = target_model.pages.count
    grown = target_model.forward(packed([[tiny.prompt(100)], [tiny.prompt(3)]], 100), (1,))
    assert target_model.pages.count > few
    assert_near(grown.aux_states[1][1, :3], first.aux_states[1][0].cpu(), 1e-5)
