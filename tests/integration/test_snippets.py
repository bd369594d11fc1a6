"""Run every command and every piece of Python in the documents, except blocks that state why they cannot run.

They run on a tiny random model under the name of the real one, in a folder with the files that they mention. The table
SMALLER shortens long runs: it is applied to the text of a block before it runs.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from snippets import DOCUMENTS, ROOT, Block, Machine, blocks, copy_tree, free_port, machine

import tiny
import tiny_heads
from outrider.catalog import CATALOG, shipped

LANGUAGES = {"bash", "python", "text", "yaml"}
# Reason why a block is not run -> number of blocks with that reason.
REASONS = {
    "it installs packages": 6,
    "it installs other engines": 1,
    "it needs a GPU": 2,
    "it needs Ray": 1,
    "it asks the hub": 1,
    "it takes an hour": 1,
    "it needs a GPU and vLLM": 1,
    "it needs an adapter": 3,
    "it needs the model": 1,
    "an excerpt of examples/own_method.py": 5,
    "an excerpt of src/outrider/models/architectures.py": 1,
    "an excerpt of src/outrider/weights/gguf.py": 1,
    "an excerpt of tests/tiny.py": 1,
    "an excerpt of tests/tiny_gguf.py": 1,
}
EXCERPT = "an excerpt of examples/own_method.py"
TRAINING = "--max-new 24 --rows 1 --length 128 --steps 1"
SMALLER = {
    r"--tokens 30000000 --seconds 540": f"--tokens 200 {TRAINING}",
    r"--tokens 30000000": "--tokens 200 --max-new 24",
    r"(--answers \w+ --out \w+)( --seconds 540)?": r"\1 --rows 1 --length 128 --steps 1",
    r"draft_vocabulary=16384(.*--out pair)": rf"draft_vocabulary=64\1 --tokens 200 {TRAINING}",
    r"seconds=540": "steps=1, rows=1, length=128",
    r"outrider verify (?!.*--samples)": "outrider verify --samples 100 --max-tokens 6 --limit 1 ",
    r"--samples 8000": "--samples 100 --max-tokens 6 --limit 1 --speculate ngram",
    r"verify (.*--limit 1 )(--model smollm2-135m)$": r"verify \1\2 --speculate suffix",
    r"bench speed .*--rounds \d": r"\g<0> --tokens 8",
    r"\./target\.gguf": "./big",
    r"\./draft\.gguf": "./small",
    r"bench kernels": "bench kernels --seconds 0.2",
    r"bench speculation": "bench speculation --rounds 1",
}
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}|{% endfor %}[assistant] "
PROMPTS = ["The sea is deep and the sky is wide", "One two one two one", "Why is the sky blue?", "Name ten birds."]


def every_block() -> list[Block]:
    return [block for document in DOCUMENTS for block in blocks(document)]


def test_every_block_names_its_language() -> None:
    assert [str(block) for block in every_block() if block.language not in LANGUAGES] == []


def test_only_blocks_with_a_reason_are_not_run() -> None:
    assert Counter(block.reason for block in every_block() if block.reason) == REASONS
    assert sum(block.runs for block in every_block()) >= 35


def test_excerpts_are_in_the_file() -> None:
    whole = (ROOT / "examples" / "own_method.py").read_text()
    excerpts = [block for block in every_block() if block.reason == EXCERPT]
    for block in excerpts:
        assert block.text in whole, block


# ---- the machine on which they run ----


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the files that the documents mention: models, heads, prompts."""
    folder = tmp_path_factory.mktemp("snippets")
    files = folder / "files"
    model = tiny.copy("llama", files / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    head = files / "head"
    tiny_heads.make("eagle3", head, own_head=False, draft_vocabulary=None)
    for name in ("my-model", "big", "small"):
        copy_tree(model, files / name)
    for copy in (files / "my-head", folder / "heads" / "smollm2-135m" / "eagle3"):
        copy_tree(head, copy)
    shipped.write_index(folder / "heads")
    (files / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    (files / "old.py").write_text("def area(x): return x * x")
    copy_tree(ROOT / "examples", files / "examples")
    return folder


@pytest.fixture(scope="session")
def computer(workspace: Path) -> Iterator[Machine]:
    model = workspace / "files" / "model"
    models = dict.fromkeys(CATALOG, model)
    with machine(workspace, models, workspace / "heads", OUTRIDER_CACHE=str(workspace / "cache")) as started:
        yield started


@pytest.fixture(scope="session")
def server(computer: Machine) -> Iterator[str]:
    """Start the server that stands for `localhost:8000` of the documents, and return its address."""
    port = str(free_port())
    environment = {**computer.environment, "SNIPPET_PORT": port}
    process = subprocess.Popen(
        ["outrider", "serve", "smollm2-135m", "--speculate", "ngram", "--max-context", "256"],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 30
        while not healthy(port):
            assert process.poll() is None and time.monotonic() < end, "the server of the snippets did not start"
            time.sleep(0.02)
        yield f"localhost:{port}"
    finally:
        process.terminate()
        process.wait()


def healthy(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


# ---- running them ----


def smaller(text: str) -> str:
    for pattern, instead in SMALLER.items():
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text


@pytest.mark.parametrize(
    "document",
    [document for document in DOCUMENTS if any(block.runs for block in blocks(document))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_blocks_of_a_document_run(
    document: Path, workspace: Path, computer: Machine, server: str, tmp_path: Path
) -> None:
    """Run the blocks in order in one folder: a later one may use the files of an earlier one."""
    copy_tree(workspace / "files", tmp_path)
    for block in blocks(document):
        if block.runs:
            text = smaller(block.text).replace("localhost:8000", server)
            done = computer.run(block, text, tmp_path)
            assert done.returncode == 0, f"{block}\n{text}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"


EXAMPLES = {
    "hello": ("-m examples.hello", "The sea is"),
    "stream": ("-m examples.stream", "[Why is the sky blue?]"),
    "own_method": ("-m examples.own_method", "tokens per step"),
    "batch": ("-m examples.batch prompts.jsonl answers.jsonl", ""),
    "train_head": ("-m examples.train_head my-head", "tokens per step"),
}


def test_every_example_is_listed() -> None:
    assert sorted(EXAMPLES) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example: str, workspace: Path, computer: Machine, tmp_path: Path) -> None:
    copy_tree(workspace / "files", tmp_path)
    command, expected = EXAMPLES[example]
    block = Block(ROOT / "examples" / f"{example}.py", 1, "bash", f"python {command}", "")
    done = computer.run(block, block.text, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert expected in done.stdout
    if example == "batch":
        answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
        assert sorted(answer["prompt"] for answer in answers) == sorted(PROMPTS)


@pytest.mark.parametrize(
    ("wrong", "status"),
    [("outrider generate hello --no-such-flag", 2), ("outrider generate x | false", 1), ("exit 3", 3)],
)
def test_a_failing_block_fails_the_test(computer: Machine, wrong: str, status: int, tmp_path: Path) -> None:
    block = Block(ROOT / "README.md", 1, "bash", wrong, "")
    assert computer.run(block, f"{wrong}\ntrue", tmp_path).returncode == status
    python = Block(ROOT / "README.md", 1, "python", "import no_such_module", "")
    assert "No module named 'no_such_module'" in computer.run(python, python.text, tmp_path).stderr
