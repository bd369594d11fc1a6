"""The documents name what exists, and the reference names all of it."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import outrider
from outrider.cli import app
from outrider.config import EngineConfig
from outrider.types import Completion, Output, SamplingParams, Stats, TokenLogprobs

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GUIDE, COMMANDS, PYTHON = (
    ROOT / "docs" / name for name in ("guide.md", "reference/commands.md", "reference/python.md")
)

sys.path.insert(0, str(ROOT / "tools"))
import check_sizes  # noqa: E402


def commands() -> dict[str, set[str]]:
    """Every command with its flags."""

    def walk(command: Any, name: str) -> dict[str, set[str]]:
        if hasattr(command, "commands"):
            inner = (walk(one, f"{name} {key}") for key, one in command.commands.items())
            return {key: flags for one in inner for key, flags in one.items()}
        return {name: {flag for parameter in command.params for flag in parameter.opts if flag.startswith("-")}}

    return walk(typer.main.get_command(app), "outrider")


KNOWN = commands()
EVERYWHERE = {"--help", "--version"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_exists(document: Path) -> None:
    text = document.read_text()
    known = set().union(*KNOWN.values(), EVERYWHERE)
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert flags <= known, f"{document.name} names flags that do not exist"


def test_every_command_line_of_the_guide_parses() -> None:
    lines = re.findall(r"^(outrider .*?)(?: +#.*)?$", GUIDE.read_text(), flags=re.MULTILINE)
    assert len(lines) > 8
    for line in lines:
        name = max((name for name in KNOWN if line.startswith(name)), key=len)
        assert set(re.findall(r"(?<= )--[a-z-]+", line)) <= KNOWN[name], line


def test_the_reference_lists_every_flag() -> None:
    sections = re.split(r"^## ", COMMANDS.read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for section in sections:
        title = section.splitlines()[0]
        name = max((name for name in KNOWN if title.startswith(name)), key=len)
        found[name] = set(re.findall(r"(?<![\w-])-{1,2}[a-z][a-z-]*", section)) - {"-m"}
    assert found == {name: flags - {"-m"} for name, flags in KNOWN.items()}


def test_the_reference_lists_every_option_and_field() -> None:
    text = PYTHON.read_text()
    options = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    assert options == [field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"]
    for kind in (Output, Completion, Stats, TokenLogprobs):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in text, f"{kind.__name__}.{field.name}"
    for name in outrider.__all__:
        assert f"`{name}`" in text


def test_the_guide_lists_every_sampling_parameter() -> None:
    section = GUIDE.read_text().split("## Sampling parameters")[1].split("## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(SamplingParams))


def test_environment_variables_are_read_somewhere() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "csrc").iterdir()]
    code = "\n".join(path.read_text() for path in sources)
    read = set(re.findall(r'(?:environ(?:\.get)?|getenv)\W{1,2}"(OUTRIDER_\w+)"', code))
    written = set(re.findall(r"OUTRIDER_[A-Z]+", GUIDE.read_text()))
    assert read == written


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", document.read_text()):
        assert target == "" or (document.parent / target).exists(), target


def test_python_in_documents_compiles() -> None:
    blocks = [
        block for path in DOCUMENTS for block in re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)
    ]
    assert len(blocks) >= 3
    for block in blocks:
        compile(block, "document", "exec")


def test_sizes_are_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "src").mkdir()
    file = tmp_path / "src" / "long.py"
    file.write_text("x\n" * check_sizes.LIMIT)
    assert check_sizes.main(tmp_path) == 0
    file.write_text("x\n" * (check_sizes.LIMIT + 1))
    assert check_sizes.main(tmp_path) == 1
    assert "src/long.py: 401 lines" in capsys.readouterr().err


def test_documents_stay_short() -> None:
    for name, limit in {"README.md": 120, "CONTRIBUTING.md": 80}.items():
        assert len((ROOT / name).read_text().splitlines()) <= limit
