"""The process of an engine: `python worker.py NAME` reads requests and writes replies, one JSON object per line.

Each engine runs in an environment of its own. This file imports only the standard library at the top, since these
environments have nothing else in common; a worker imports its engine in its methods. A worker has `open`, `complete`
and optionally `prepare`. All engines are timed here, in the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
CPUINFO = Path("/proc/cpuinfo")
SPARE_SLOTS = 64  # cache slots of a request beyond its text, for drafts that are not verified yet
LOOKUP_NGRAM = 2  # llama.cpp: maximum length of the n-gram that is looked up
VLLM_WIDTH = 4  # draft tokens
VLLM_MEMORY = 0.22  # share of a GPU for one process: plain decoding and speculation run in one each, beside ours


class OutriderWorker:
    """Outrider itself, run in the same way as its peers."""

    def open(
        self,
        model: str,
        threads: int,
        context: int,
        batch: int,
        speculate: bool,
        method: str,
        backend: str = "cpu",
        **fields: Any,
    ) -> dict[str, Any]:
        import outrider

        self.llm = outrider.LLM(
            model,
            backend=backend,
            threads=threads,
            max_requests=batch,
            cache_tokens=batch * (context + SPARE_SLOTS),
            prefix_cache=False,  # prompts repeat
            speculate=method if speculate else "none",
            **fields,
        )
        return {"version": outrider.__version__, "weights": "as given"}

    def complete(self, prompts: list[list[int]], tokens: int, width: int | None) -> list[list[int]]:
        import outrider

        params = outrider.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return [list(output.completions[0].token_ids) for output in self.llm.generate(prompts, params)]


@dataclass
class LlamaSequence:
    number: int
    text: list[int]  # all but the last token are in the cache
    wanted: int  # final length of the text
    draft: list[int] = field(default_factory=list)
    first_row: int = 0  # of its logits in the batch


class LlamaWorker:
    """llama.cpp through the C functions of its Python package: batches of sequences, speculation by prompt lookup.

    The loop of the package itself serves one sequence and copies the logits of each token; this one does neither.
    """

    def open(self, model: str, threads: int, context: int, batch: int, speculate: bool) -> dict[str, Any]:
        import llama_cpp
        import numpy

        self.llama, self.numpy = llama_cpp, numpy
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), settings)
        if not self.model:
            raise ValueError(f"llama.cpp cannot read {model}")
        options = llama_cpp.llama_context_default_params()
        # Drafted tokens take cache slots until they are verified.
        options.n_ctx, options.n_seq_max = batch * (context + SPARE_SLOTS), batch
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
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self.llama.llama_memory_clear(self.memory, True)
        running = [LlamaSequence(number, list(prompt), len(prompt) + tokens) for number, prompt in enumerate(prompts)]
        for one in running:
            self._read(one)
        drafter = LlamaPromptLookupDecoding(LOOKUP_NGRAM, width) if width else None
        while any(len(one.text) < one.wanted for one in running):
            self._step([one for one in running if len(one.text) < one.wanted], drafter)
        return [one.text[len(prompt) :] for one, prompt in zip(running, prompts, strict=True)]

    def _read(self, one: LlamaSequence) -> None:
        """Prefill the prompt and append the first token."""
        for begin in range(0, len(one.text), self.batch_tokens):
            self.batch.n_tokens = 0
            piece = one.text[begin : begin + self.batch_tokens]
            for position, token in enumerate(piece, begin):
                self._put(token, position, one.number, logits=position == len(one.text) - 1)
            self._run()
        one.text.append(self._argmax(self.batch.n_tokens - 1))

    def _step(self, running: list[LlamaSequence], drafter: Any) -> None:
        """Run the last token of each sequence and its draft in one pass, and accept the matching prefix."""
        self.batch.n_tokens = 0
        for one in running:
            one.first_row, one.draft = self.batch.n_tokens, []
            most = one.wanted - len(one.text) - 1
            if drafter is not None and most > 0:
                one.draft = [int(token) for token in drafter(self.numpy.array(one.text, dtype=self.numpy.intc))][:most]
            for position, token in enumerate([one.text[-1], *one.draft], len(one.text) - 1):
                self._put(token, position, one.number, logits=True)
        self._run()
        for one in running:
            self._verify(one)

    def _verify(self, one: LlamaSequence) -> None:
        for row in range(len(one.draft) + 1):
            one.text.append(self._argmax(one.first_row + row))
            if row == len(one.draft) or one.text[-1] != one.draft[row]:
                break
        if one.draft:
            self.llama.llama_memory_seq_rm(self.memory, one.number, len(one.text) - 1, -1)

    def _put(self, token: int, position: int, sequence: int, logits: bool) -> None:
        row = self.batch.n_tokens
        self.batch.token[row], self.batch.pos[row], self.batch.logits[row] = token, position, logits
        self.batch.n_seq_id[row] = 1
        self.batch.seq_id[row][0] = sequence
        self.batch.n_tokens = row + 1

    def _run(self) -> None:
        if self.llama.llama_decode(self.context, self.batch):
            raise ValueError("llama.cpp cannot decode the batch")

    def _argmax(self, row: int) -> int:
        logits = self.llama.llama_get_logits_ith(self.context, row)
        row_logits = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self.vocabulary)).contents
        return int(self.numpy.frombuffer(row_logits, dtype=self.numpy.float32).argmax())


class OpenVinoWorker:
    """OpenVINO GenAI with int8 weights and continuous batching, speculation by prompt lookup."""

    def prepare(self, model: str, into: str) -> dict[str, Any]:
        """Convert the weights to OpenVINO's format: int8 with a scale for each row."""
        from optimum.intel import OVModelForCausalLM
        from optimum.intel.openvino import OVWeightQuantizationConfig

        eight = OVWeightQuantizationConfig(bits=8)
        exported = OVModelForCausalLM.from_pretrained(model, export=True, compile=False, quantization_config=eight)
        exported.save_pretrained(into)
        self._write_tokenizer(model, into)
        return {}

    def _write_tokenizer(self, model: str, into: str) -> None:
        import openvino
        from openvino_tokenizers import convert_tokenizer
        from transformers import AutoTokenizer

        tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
        openvino.save_model(tokenizer, f"{into}/openvino_tokenizer.xml")
        openvino.save_model(detokenizer, f"{into}/openvino_detokenizer.xml")

    def open(self, model: str, threads: int, context: int, batch: int, speculate: bool) -> dict[str, Any]:
        import openvino_genai

        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if speculate:
            options["prompt_lookup"] = True
        facts = {"version": openvino_genai.__version__, "weights": "int8"}
        try:
            self.pipeline = self._batches(model, batch * context, batch, options)
            self.paged = True
        except RuntimeError:
            if speculate:
                raise
            # On processors without its paged attention, use the simpler pipeline.
            self.pipeline = openvino_genai.LLMPipeline(model, "CPU", **options)
            self.paged = False
        return facts

    def _batches(self, model: str, tokens: int, batch: int, options: dict[str, Any]) -> Any:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # prompts repeat
        scheduler.max_num_seqs = batch
        scheduler.max_num_batched_tokens = max(tokens, 512)
        scheduler.cache_size = 1  # gigabytes
        return openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)

    def complete(self, prompts: list[list[int]], tokens: int, width: int | None) -> list[list[int]]:
        import openvino_genai

        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = settings.min_new_tokens = tokens
        settings.ignore_eos = True
        settings.do_sample = False
        if width is not None:
            settings.num_assistant_tokens = width
            settings.max_ngram_size = 3
        if not self.paged:
            found = self.pipeline.generate(self._padded(prompts), settings)
            return [list(text) for text in found.tokens]
        asked = [self._tensor([prompt]) for prompt in prompts]
        answers = self.pipeline.generate(asked, [settings] * len(asked))
        return [list(one.m_generation_ids[0]) for one in answers]

    def _padded(self, prompts: list[list[int]]) -> Any:
        import openvino_genai

        longest = max(len(prompt) for prompt in prompts)
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return openvino_genai.TokenizedInputs(self._tensor(ids), self._tensor(mask))

    def _tensor(self, rows: list[list[int]]) -> Any:
        import numpy
        import openvino

        return openvino.Tensor(numpy.array(rows, dtype=numpy.int64))


def has_bfloat16(source: Path = CPUINFO) -> bool:
    """Return whether the processor multiplies in bf16: without it fp32 is faster."""
    words = set(source.read_text().split()) if source.exists() else set()
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


class TransformersWorker:
    """transformers: `generate`, speculation by prompt lookup."""

    def open(self, model: str, threads: int, context: int, batch: int, speculate: bool) -> dict[str, Any]:
        import torch
        import transformers

        torch.set_num_threads(threads)
        dtype = torch.bfloat16 if has_bfloat16() else torch.float32
        opened: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model = opened.eval()
        self.model.generation_config.eos_token_id = None  # always generate `tokens` tokens
        self.model.config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        return {"version": transformers.__version__, "weights": str(dtype).removeprefix("torch.")}

    def complete(self, prompts: list[list[int]], tokens: int, width: int | None) -> list[list[int]]:
        import torch

        longest = max(len(prompt) for prompt in prompts)
        # [B, T], padded on the left
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        lookup = {} if width is None else {"prompt_lookup_num_tokens": width}
        with torch.inference_mode():
            output = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **lookup
            )
        return [row[longest : longest + tokens] for row in output.tolist()]


class VllmWorker:
    """vLLM on the CPU, speculation by n-gram lookup; on a GPU, speculation by the head that we use, if it reads it."""

    def open(
        self,
        model: str,
        threads: int,
        context: int,
        batch: int,
        speculate: bool,
        backend: str = "cpu",
        drafts: dict[str, Any] | None = None,
        random: bool = False,
        quantization: str | None = None,
    ) -> dict[str, Any]:
        drafts = drafts or {
            "method": "ngram",
            "num_speculative_tokens": VLLM_WIDTH,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
        options = self._on_gpu(random, quantization) if backend == "cuda" else self._on_cpu(threads)
        import vllm

        self.llm = vllm.LLM(
            model,
            skip_tokenizer_init=True,
            max_model_len=context + drafts["num_speculative_tokens"] + 1,
            max_num_seqs=batch,
            enable_prefix_caching=False,  # prompts repeat
            speculative_config=drafts if speculate else None,
            **options,
        )
        self.sampling = vllm.SamplingParams
        weights = "random" if random else options["dtype"]
        return {"version": vllm.__version__, "weights": f"{weights}, {quantization}" if quantization else weights}

    def _on_gpu(self, random: bool, quantization: str | None) -> dict[str, Any]:
        """Return options for a GPU. random: fill the shape in config.json with random weights."""
        return {
            "dtype": "bfloat16",
            "gpu_memory_utilization": VLLM_MEMORY,
            "load_format": "dummy" if random else "auto",
            "quantization": quantization,
        }

    def _on_cpu(self, threads: int) -> dict[str, Any]:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, so that its memory can be measured
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # by default it reserves a core
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # Its bf16 kernels run on x86 and on Arm processors with bf16; on other Arm processors they raise SIGILL.
        has_bf16 = platform.machine() != "aarch64" or "bf16" in CPUINFO.read_text().split()
        return {"dtype": "bfloat16" if has_bf16 else "float32"}

    def complete(self, prompts: list[list[int]], tokens: int, width: int | None) -> list[list[int]]:
        params = self.sampling(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def die_with_parent() -> None:
    """Exit with the parent: if it is killed while this process is stopped, nothing would resume it."""
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def answer(worker: Any, request: dict[str, Any]) -> dict[str, Any]:
    action = request.pop("do")
    begin = time.perf_counter()
    found = getattr(worker, action)(**request)
    return {"found": found, "seconds": time.perf_counter() - begin}


def serve(worker: Any, requests: TextIO, answers: TextIO) -> None:
    for line in requests:
        try:
            reply = answer(worker, json.loads(line))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


# Workers by the name of their engine in `registry.py`.
WORKERS = {
    "outrider": OutriderWorker,
    "llama.cpp": LlamaWorker,
    "openvino": OpenVinoWorker,
    "transformers": TransformersWorker,
    "vllm": VllmWorker,
}


def main(worker: Any) -> None:
    """Serve a worker on stdin and stdout until the input ends."""
    die_with_parent()
    # Engines print to stdout: only this copy of it leads to the parent.
    private = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.pop(0)  # this folder, which holds no modules to import
    serve(worker, sys.stdin, private)


if __name__ == "__main__":
    main(WORKERS[sys.argv[1]]())
