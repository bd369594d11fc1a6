"""llama.cpp through the C functions of its Python package: batches of sequences, speculation by prompt lookup.

The loop of the package itself serves one sequence and copies the logits of each token; this one does neither.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

NGRAM = 2  # maximum length of the n-gram that is looked up


@dataclass
class Sequence:
    number: int
    text: list[int]  # all but the last token are in the cache
    wanted: int  # final length of the text
    draft: list[int] = field(default_factory=list)
    first_row: int = 0  # of its logits in the batch


class Worker:
    def open(self, model: str, threads: int, context: int, batch: int, speculate: bool) -> dict[str, Any]:
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), settings)
        if not self.model:
            raise ValueError(f"llama.cpp cannot read {model}")
        options = llama_cpp.llama_context_default_params()
        # Drafted tokens take cache slots until they are verified.
        options.n_ctx, options.n_seq_max = batch * (context + 64), batch
        options.n_batch = max(2048, batch * 64)
        options.n_threads = options.n_threads_batch = threads
        self.batch_tokens = options.n_batch
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise ValueError("llama.cpp cannot make a context")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(self.batch_tokens, 0, 1)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        return {"version": llama_cpp.__version__, "weights": "as given"}

    def complete(self, prompts: list[list[int]], tokens: int, width: int | None) -> list[list[int]]:
        llama_cpp.llama_memory_clear(self.memory, True)
        running = [Sequence(number, list(prompt), len(prompt) + tokens) for number, prompt in enumerate(prompts)]
        for one in running:
            self._read(one)
        drafter = LlamaPromptLookupDecoding(NGRAM, width) if width else None
        while any(len(one.text) < one.wanted for one in running):
            self._step([one for one in running if len(one.text) < one.wanted], drafter)
        return [one.text[len(prompt) :] for one, prompt in zip(running, prompts, strict=True)]

    def _read(self, one: Sequence) -> None:
        """Prefill the prompt and append the first token."""
        for begin in range(0, len(one.text), self.batch_tokens):
            self.batch.n_tokens = 0
            piece = one.text[begin : begin + self.batch_tokens]
            for position, token in enumerate(piece, begin):
                self._put(token, position, one.number, logits=position == len(one.text) - 1)
            self._run()
        one.text.append(self._argmax(self.batch.n_tokens - 1))

    def _step(self, running: list[Sequence], drafter: Any) -> None:
        """Run the last token of each sequence and its draft in one pass, and accept the matching prefix."""
        self.batch.n_tokens = 0
        for one in running:
            one.first_row, one.draft = self.batch.n_tokens, []
            most = one.wanted - len(one.text) - 1
            if drafter is not None and most > 0:
                one.draft = [int(token) for token in drafter(numpy.array(one.text, dtype=numpy.intc))][:most]
            for position, token in enumerate([one.text[-1], *one.draft], len(one.text) - 1):
                self._put(token, position, one.number, logits=True)
        self._run()
        for one in running:
            self._verify(one)

    def _verify(self, one: Sequence) -> None:
        for row in range(len(one.draft) + 1):
            one.text.append(self._argmax(one.first_row + row))
            if row == len(one.draft) or one.text[-1] != one.draft[row]:
                break
        if one.draft:
            llama_cpp.llama_memory_seq_rm(self.memory, one.number, len(one.text) - 1, -1)

    def _put(self, token: int, position: int, sequence: int, logits: bool) -> None:
        row = self.batch.n_tokens
        self.batch.token[row], self.batch.pos[row], self.batch.logits[row] = token, position, logits
        self.batch.n_seq_id[row] = 1
        self.batch.seq_id[row][0] = sequence
        self.batch.n_tokens = row + 1

    def _run(self) -> None:
        if llama_cpp.llama_decode(self.context, self.batch):
            raise ValueError("llama.cpp cannot decode the batch")

    def _argmax(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        row_logits = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self.vocabulary)).contents
        return int(numpy.frombuffer(row_logits, dtype=numpy.float32).argmax())
