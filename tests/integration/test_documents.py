"""Check that the documents name only flags, links and options that exist, and that the reference names all of them."""

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
COMING_FROM = ("from-vllm.md", "from-llama-cpp.md")  # the first column of their tables holds flags of other programs
GUIDE, COMMANDS, PYTHON = (
    ROOT / "docs" / name for name in ("guide.md", "reference/commands.md", "reference/python.md")
)


def commands() -> dict[str, set[str]]:
    """Return the flags of every command."""

    def collect(command: Any, name: str) -> dict[str, set[str]]:
        if hasattr(command, "commands"):
            children = (collect(child, f"{name} {key}") for key, child in command.commands.items())
            return {key: flags for child in children for key, flags in child.items()}
        return {
            name: {
                flag
                for parameter in command.params
                for flag in [*parameter.opts, *parameter.secondary_opts]
                if flag.startswith("-")
            }
        }

    return collect(typer.main.get_command(app), "outrider")


KNOWN = commands()
EVERYWHERE = {"--help", "--version"}
TOOLS = {flag for path in (ROOT / "tools").glob("*.py") for flag in re.findall(r'"(--[a-z][a-z-]*)"', path.read_text())}


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_documents_name_no_unknown_flag(document: Path) -> None:
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
    fields = text.split("## Output")[1].replace("\n  ", " ")  # one line for each class, after those of Output itself
    for kind in (Output, Completion, Stats, TokenLogprobs):
        start = "`request_id`" if kind is Output else f"- `{kind.__name__}`:"
        (line,) = (line for line in fields.splitlines() if line.startswith(start))
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
    """Return the anchor of a heading, as Markdown's table of contents makes it."""
    text = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def anchors(document: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_no_link_is_broken(document: Path) -> None:
    for target, _, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", document.read_text()):
        linked = (document.parent / target).resolve() if target else document
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"
        # The site contains the folder `docs` only.
        assert not document.is_relative_to(DOCS) or linked.is_relative_to(DOCS), target


def pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in pages(value)]


def test_the_site_has_every_page_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(pages(site["nav"])) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_generated_pages_are_up_to_date() -> None:
    for path, content in reference.pages().items():
        assert path.read_text() == content, f"{path.name}: run `python tools/reference.py`"


def test_a_missing_flag_is_added_by_the_generator() -> None:
    text = COMMANDS.read_text()
    (row,) = re.findall(r"^\| `--ignore-eos` .*\n", text, flags=re.MULTILINE)
    assert reference.command_page(text.replace(row, "")) == text


def test_the_page_on_methods_names_every_need() -> None:
    section = (DOCS / "add-a-method.md").read_text().split("## Needs")[1].split("## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    assert named == [field.name for field in dataclasses.fields(Needs) if field.name != "width"]


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    titles = [release.splitlines()[0] for release in releases]
    assert titles[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", title) for title in titles[1:])
    for release in releases:
        found = re.findall(r"^### (.+)$", release, flags=re.MULTILINE)
        assert found == [kind for kind in kinds if kind in found] and found


def test_files_over_the_size_limit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
