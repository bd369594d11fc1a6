"""The support table is up to date, and every cell is true: supported combinations run, the others are rejected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import support_table
import tiny_heads
from outrider import LLM, SamplingParams, UserError
from outrider.speculation import available

# Heads with the target's output matrix: the quality of their drafts does not matter here.
PLAIN: dict[str, Any] = {"own_head": False, "draft_vocabulary": None}
QUICK = {
    **dict.fromkeys(("eagle3", "peagle", "dflash", "dspark"), PLAIN),
    "eagle": {"own_head": False},
}
COLUMNS = {
    "`exact`": "verify=exact",
    "`rejection`": "verify=rejection",
    "`block`": "verify=block",
    "`synthetic`": "verify=synthetic,width=2,length=1.5",
    "trees": "width=4,branches=2",
    "sampled": "draft=probabilistic",
}


def cells() -> dict[str, dict[str, str]]:
    """Return the cells of the page by method and column."""
    section = support_table.PAGE.read_text().split("## Methods")[1].split("## Devices")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines()]
    table = [row for row in rows if len(row) > 3]
    return {row[0].strip("`"): dict(zip(table[0], row, strict=True)) for row in table if row[0].startswith("`")}


def test_the_support_page_is_up_to_date() -> None:
    assert support_table.PAGE.read_text() == support_table.page()
    assert list(cells()) == available()


@pytest.fixture(params=available())
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_cell_of_the_support_table_is_true(method: str, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    options = tiny_heads.make(method, tmp_path, **QUICK.get(method, {}))
    setting = ",".join(f"{key}={value}" for key, value in {**options, "adaptive": "no"}.items())
    supported = cells()[method]
    for column, option in COLUMNS.items():
        assert supported[column] == possible(str(tiny_folder()), f"{method}:{setting},{option}"), column
    llm = LLM(str(tiny_folder()), backend="cpu", speculate=f"{method}:{setting}")
    needs = llm.engine.spec_manager.methods[method].needs
    assert supported["multi-step"] == ("yes" if needs.multi_step else "no")


def possible(model: str, speculate: str) -> str:
    try:
        llm = LLM(model, backend="cpu", speculate=speculate)
    except UserError:
        return "no"
    expected = "a b a b" if speculate.startswith("prediction") else None
    params = SamplingParams(max_tokens=4, temperature=0.8, ignore_eos=True, prediction=expected)
    (output,) = llm.generate("a b a b a", params)
    assert len(output.completions[0].token_ids) == 4
    return "yes"
