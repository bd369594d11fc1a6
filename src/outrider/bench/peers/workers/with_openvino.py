"""OpenVINO GenAI with int8 weights and continuous batching, speculation by prompt lookup."""

from __future__ import annotations

from typing import Any


class Worker:
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
