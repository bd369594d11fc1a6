"""The documents name what exists, and the reference names all of it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import check_sizes
import outrider
import reference
from outrider.cli import app
from outrider.config import EngineConfig
from outrider.speculation import Needs
from outrider.types import Completion, Output, SamplingParams, Stats, TokenLogprobs

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
NAMES = [document.relative_to(ROOT).as_posix() for document in DOCUMENTS]
COMING_FROM = ("from-vllm.md", "from-llama-cpp.md")  # their tables begin with other programs' flags
GUIDE, COMMANDS, PYTHON = (
    ROOT / "docs" / name for name in ("guide.md", "reference/commands.md", "reference/python.md")
)


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
TOOLS = {flag for path in (ROOT / "tools").glob("*.py") for flag in re.findall(r'"(--[a-z][a-z-]*)"', path.read_text())}


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_every_flag_exists(document: Path) -> None:
    text = document.read_text()
    if document.name in COMING_FROM:
        text = re.sub(r"^\| [^|]* \|", "|", text, flags=re.MULTILINE)
    known = set().union(*KNOWN.values(), EVERYWHERE, TOOLS)
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert flags <= known, f"{document.name} names flags that do not exist"


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
    told = text.split("## Output")[1].replace("\n  ", " ")  # a line for each kind, after those of Output itself
    for kind in (Output, Completion, Stats, TokenLogprobs):
        start = "`request_id`" if kind is Output else f"- `{kind.__name__}`:"
        (line,) = (line for line in told.splitlines() if line.startswith(start))
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in line, f"{kind.__name__}.{field.name}"
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


def slug(heading: str) -> str:
    """The anchor of a heading, as Markdown's table of contents makes it."""
    text = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def anchors(document: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_links_lead_somewhere(document: Path) -> None:
    for target, _, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", document.read_text()):
        place = (document.parent / target).resolve() if target else document
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), f"{target}#{anchor}"
        # The site has the folder `docs` and nothing else.
        assert not document.is_relative_to(DOCS) or place.is_relative_to(DOCS), target


def pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in pages(value)]


def test_the_site_has_every_page_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(pages(site["nav"])) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_what_is_generated_is_up_to_date() -> None:
    for path, content in reference.pages().items():
        assert path.read_text() == content, f"{path.name}: run `python tools/reference.py`"


def test_a_new_flag_is_seen() -> None:
    """The generator follows the commands: a table that lacks a flag is not what it writes."""
    text = COMMANDS.read_text()
    (row,) = re.findall(r"^\| `--ignore-eos` .*\n", text, flags=re.MULTILINE)
    assert reference.command_page(text.replace(row, "")) == text


def test_the_walk_through_a_method_names_every_need() -> None:
    section = (DOCS / "add-a-method.md").read_text().split("## Needs")[1].split("## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    assert named == [field.name for field in dataclasses.fields(Needs) if field.name != "width"]


def test_the_changelog_keeps_its_form() -> None:
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    titles = [release.splitlines()[0] for release in releases]
    assert titles[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", title) for title in titles[1:])
    for release in releases:
        found = re.findall(r"^### (.+)$", release, flags=re.MULTILINE)
        assert found == [kind for kind in kinds if kind in found] and found


def test_sizes_are_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "src").mkdir()
    file = tmp_path / "src" / "long.py"
    file.write_text("x\n" * check_sizes.LIMIT)
    assert check_sizes.main(tmp_path) == 0
    file.write_text("x\n" * (check_sizes.LIMIT + 1))
    assert check_sizes.main(tmp_path) == 1
    assert f"src/long.py: {check_sizes.LIMIT + 1} lines" in capsys.readouterr().err


def test_documents_stay_short() -> None:
    for name, limit in {"README.md": 120, "CONTRIBUTING.md": 80}.items():
        assert len((ROOT / name).read_text().splitlines()) <= limit
