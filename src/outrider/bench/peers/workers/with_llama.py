"""llama.cpp through the C functions of its Python package: batches of sequences, and prompt lookup as its speculation.

The package's own loop serves one sequence and copies the scores of each token; this one does neither.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

NGRAM = 2  # tokens that must match, at most


@dataclass
class Sequence:
    number: int
    text: list[int]  # what is decided; all but the last token is in the cache
    wanted: int  # length of the text in the end
    draft: list[int] = field(default_factory=list)
    first_row: int = 0  # of its scores in the present batch


class Worker:
    def open(self, model: str, threads: int, context: int, batch: int, speculate: bool) -> dict[str, Any]:
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), settings)
        if not self.model:
            raise ValueError(f"llama.cpp cannot read {model}")
        options = llama_cpp.llama_context_default_params()
        # A draft stands in the cache until it is judged.
        options.n_ctx, options.n_seq_max = batch * (context + 64), batch
        options.n_batch = max(2048, batch * 64)
        options.n_threads = options.n_threads_batch = threads
        self.room = options.n_batch
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise ValueError("llama.cpp cannot make a context")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(self.room, 0, 1)
        self.words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
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
        """The whole prompt, and the token after it."""
        for begin in range(0, len(one.text), self.room):
            self.batch.n_tokens = 0
            piece = one.text[begin : begin + self.room]
            for place, token in enumerate(piece, begin):
                self._put(token, place, one.number, scores=place == len(one.text) - 1)
            self._run()
        one.text.append(self._best(self.batch.n_tokens - 1))

    def _step(self, running: list[Sequence], drafter: Any) -> None:
        """The last token of each sequence and its draft, in one pass; what the model would have said itself stays."""
        self.batch.n_tokens = 0
        for one in running:
            one.first_row, one.draft = self.batch.n_tokens, []
            room = one.wanted - len(one.text) - 1
            if drafter is not None and room > 0:
                one.draft = [int(token) for token in drafter(numpy.array(one.text, dtype=numpy.intc))][:room]
            for place, token in enumerate([one.text[-1], *one.draft], len(one.text) - 1):
                self._put(token, place, one.number, scores=True)
        self._run()
        for one in running:
            self._judge(one)

    def _judge(self, one: Sequence) -> None:
        for row in range(len(one.draft) + 1):
            one.text.append(self._best(one.first_row + row))
            if row == len(one.draft) or one.text[-1] != one.draft[row]:
                break
        if one.draft:
            llama_cpp.llama_memory_seq_rm(self.memory, one.number, len(one.text) - 1, -1)

    def _put(self, token: int, place: int, sequence: int, scores: bool) -> None:
        at = self.batch.n_tokens
        self.batch.token[at], self.batch.pos[at], self.batch.logits[at] = token, place, scores
        self.batch.n_seq_id[at] = 1
        self.batch.seq_id[at][0] = sequence
        self.batch.n_tokens = at + 1

    def _run(self) -> None:
        if llama_cpp.llama_decode(self.context, self.batch):
            raise ValueError("llama.cpp cannot decode the batch")

    def _best(self, row: int) -> int:
        scores = llama_cpp.llama_get_logits_ith(self.context, row)
        within = ctypes.cast(scores, ctypes.POINTER(ctypes.c_float * self.words)).contents
        return int(numpy.frombuffer(within, dtype=numpy.float32).argmax())
