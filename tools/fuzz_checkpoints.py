"""Fuzz the checkpoint readers: each mutated checkpoint is refused with one sentence, or loads and generates.

    python tools/fuzz_checkpoints.py SAMPLES.json --cases 10000

SAMPLES.json lists valid checkpoints: {"kind": "gguf" | "safetensors" | "head", "path": ..., "target": ..., "method":
..., "options": {...}}, the last three for heads. A case depends only on (seed, number): `--first N --cases 1` repeats
it. Each worker runs many cases; a crash, a timeout or too much memory is a failure. The report contains the output of
a worker that crashed.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import fuzz_library
from fuzz_gguf import damage_gguf
from fuzz_mutations import damage_bytes, damage_json, damage_safetensors

DEADLINE = 20.0  # seconds for one case; most take about one second
ALLOWANCE = 512 << 20  # bytes of address space beyond what valid checkpoints need
RESIDENT = 256 << 20  # bytes that one case may touch
LONGEST = 1000  # characters of an error message, at most
CHUNK = 500  # cases of one worker process
KEYS = (  # of a config.json that many do without
    "quantization_config", "layer_types", "sliding_window", "use_sliding_window", "rope_scaling", "rope_parameters",
    "text_config", "eagle_config", "head_dim", "tie_word_embeddings", "attention_bias", "no_rope_layers",
    "draft_vocab_size", "mask_token_id", "block_size", "target_layer_ids", "eos_token_id", "max_window_layers",
    "markov_rank",
)  # fmt: skip
Sample = dict[str, Any]


def damage_file(random: Random, file: Path) -> None:
    whole = file.read_bytes()
    try:
        if file.suffix == ".gguf":
            damaged = damage_gguf(random, whole)
        elif file.suffix == ".json":
            damaged = damage_json(random, whole, KEYS if file.name == "config.json" else ())
        elif file.suffix == ".safetensors":
            damaged = damage_safetensors(random, whole)
        else:
            damaged = damage_bytes(random, whole)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error):  # it was damaged before
        damaged = damage_bytes(random, whole)
    file.write_bytes(damaged)


def prepare(random: Random, sample: Sample, scratch: Path) -> Path:
    """A damaged copy."""
    source = Path(sample["path"])
    copy = scratch / source.name
    if source.is_file():
        shutil.copyfile(source, copy)
        damage_file(random, copy)
        return copy
    shutil.copytree(source, copy, dirs_exist_ok=True)
    files = sorted(copy.iterdir())
    heavy = {"config.json": 5, "tokenizer.json": 2}
    weights = [heavy.get(file.name, 1 if file.suffix == ".json" else 5) for file in files]
    for file in random.choices(files, weights, k=random.choice((1, 1, 1, 2))):
        if random.random() < 0.01:
            file.unlink(missing_ok=True)
        elif file.exists():
            damage_file(random, file)
    return copy


def generate(random: Random, sample: Sample, path: Path) -> None:
    """What a user would do with it."""
    from outrider import LLM, SamplingParams

    options: dict[str, Any] = {}
    if sample["kind"] == "head":
        named = {**sample["options"], "model": str(path), "adaptive": random.choice(["no", "no", "yes"])}
        options["speculate"] = f"{sample['method']}:" + ",".join(f"{key}={value}" for key, value in named.items())
    model = sample.get("target") or str(path)
    llm = LLM(model, cache_tokens=128, max_requests=2, max_step_tokens=16, threads=1, backend="cpu", **options)
    prompt: Any = random.choice(["ab c", [3, 4, 5]])
    temperature = random.choice([0.0, 1.0])
    output = llm.generate([prompt], SamplingParams(max_tokens=6, temperature=temperature, ignore_eos=True))[0]
    tokens = output.completions[0].token_ids
    vocabulary = llm.engine.model.config.vocabulary
    assert tokens and all(0 <= token < vocabulary for token in tokens), f"tokens {tokens} of {vocabulary}"


def peak() -> int:
    """The most memory that was resident since the last call, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return found


def exhausted(error: BaseException | None) -> bool:
    """Whether a want of memory is behind it."""
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def attempt(random: Random, sample: Sample, scratch: Path) -> tuple[str, str]:
    """What came of one case: `refused`, `loaded` or what is wrong with it; and what was said."""
    from outrider.errors import UserError

    path = prepare(random, sample, scratch)
    try:
        generate(random, sample, path)
    except UserError as error:
        said = str(error).replace(str(scratch), "")
        if exhausted(error):
            return "runaway", said
        if "\n" in said or said.endswith(".") or len(said) > LONGEST or not said.isprintable():
            return "unreadable", said[: 2 * LONGEST]
        return "refused", said
    except BaseException:  # panics of foreign libraries are no Exception
        return "crashed", traceback.format_exc()
    return "loaded", ""


def draw(samples: list[Sample], seed: int, number: int) -> tuple[Random, Sample]:
    random = Random(f"{seed}/{number}")
    kinds = sorted({sample["kind"] for sample in samples})
    return random, random.choice([sample for sample in samples if sample["kind"] == kinds[number % len(kinds)]])


def work(samples: list[Sample], seed: int, numbers: range) -> None:
    """A worker: one line of JSON for each case."""
    faulthandler.enable()
    for sample in {sample["kind"]: sample for sample in samples}.values():  # what sound ones need is not counted
        generate(Random(0), sample, Path(sample["path"]))
    gc.freeze()  # collecting after each case is cheap then
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ALLOWANCE, used + ALLOWANCE))
    for number in numbers:
        random, sample = draw(samples, seed, number)
        gc.collect()
        peak()
        before, started = peak(), time.perf_counter()
        faulthandler.dump_traceback_later(DEADLINE, exit=True)
        with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
            result, said = attempt(random, sample, Path(scratch))
        faulthandler.cancel_dump_traceback_later()
        grown = peak() - before
        if grown > RESIDENT and result in ("refused", "loaded"):
            result, said = "runaway", f"{grown >> 20} MiB; {said}"
        line = {"number": number, "kind": sample["kind"], "result": result, "said": said, "bytes": grown}
        sys.stdout.write(json.dumps(line | {"seconds": time.perf_counter() - started}) + "\n")
        sys.stdout.flush()


def run_worker(command: list[str], numbers: range) -> Iterator[dict[str, Any]]:
    """The results of these cases, by as many workers as it takes."""
    while numbers:
        part = ["--worker", "--first", str(numbers.start), "--cases", str(len(numbers))]
        with tempfile.TemporaryFile("w+") as complaints:
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": complaints, "text": True}
            with subprocess.Popen([*command, *part], **pipes) as child:
                assert child.stdout is not None
                for text in child.stdout:
                    line = json.loads(text)
                    numbers = range(line["number"] + 1, numbers.stop)
                    yield line
            status = child.returncode
            complaints.seek(0)
            said = complaints.read()[-4000:]
        if numbers:
            result = "hung" if "Timeout (" in said else f"died ({status})"
            yield {"number": numbers.start, "kind": "", "result": result, "said": said, "bytes": 0, "seconds": 0.0}
            numbers = numbers[1:]


def report(lines: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    sound = [line for line in lines if line["result"] in ("refused", "loaded")]
    return {
        "cases": len(lines),
        "seconds": round(seconds, 1),
        "results": {
            kind: dict(Counter(line["result"] for line in lines if line["kind"] == kind))
            for kind in sorted({line["kind"] for line in lines})
        },
        "slowest_seconds": round(max((line["seconds"] for line in sound), default=0.0), 2),
        "largest_mib": max((line["bytes"] for line in sound), default=0) >> 20,
        "different_refusals": len({line["said"].split("`")[0] + line["said"][-30:] for line in sound if line["said"]}),
        "failures": [line for line in lines if line not in sound],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Open damaged checkpoints")
    parser.add_argument("samples", type=Path)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="where each result is written as it comes")
    parser.add_argument("--library", type=Path, help="the native library to load instead of the usual one")
    parser.add_argument("--worker", action="store_true", help="take the cases in this process")
    chosen = parser.parse_args()
    numbers = range(chosen.first, chosen.first + chosen.cases)
    if chosen.worker:
        if chosen.library:
            fuzz_library.use(chosen.library)
        work(json.loads(chosen.samples.read_text()), chosen.seed, numbers)
        return 0
    started = time.perf_counter()
    chunk = min(CHUNK, -(-chosen.cases // chosen.workers))
    chunks = [numbers[at : at + chunk] for at in range(0, len(numbers), chunk)]
    command = [sys.executable, __file__, str(chosen.samples), "--seed", str(chosen.seed)]
    command += ["--library", str(chosen.library)] if chosen.library else []
    lines: list[dict[str, Any]] = []
    with ThreadPoolExecutor(chosen.workers) as workers, chosen.log.open("w", buffering=1) as log:

        def take(chunk: range) -> None:
            for line in run_worker(command, chunk):
                lines.append(line)
                log.write(json.dumps(line) + "\n")

        for _ in workers.map(take, chunks):
            pass
    whole = report(lines, time.perf_counter() - started)
    sys.stdout.write(json.dumps(whole, indent=2) + "\n")
    return 1 if whole["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
