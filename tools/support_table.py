"""Write docs/reference/support.md from the methods and from the tests that hold them to it, or --check it.

What a table says is what a test runs: methods and their options are asked for, the requests are those of the first law.
"""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from outrider.config import BACKENDS
from outrider.speculation import available, find
from outrider.types import SamplingParams
from pages import write_or_check

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "support.md"
TESTS = ROOT / "tests"
HEADER = """# Support

Which method does what, on which device, with which parameter. Nothing is silently ignored: what a combination cannot
do, it refuses at the start, in one sentence that says what to do instead. Written by `tools/support_table.py` from the
methods and from the tests; `tests/integration/test_support.py` tries every cell of the first table.

## Methods
"""
METHODS = """
- **trees**: `branches=` of 2 and more; a tree takes `exact`, `synthetic` and `rejection`, not `block`.
- **drawn**: `draft=probabilistic`, tokens drawn at the request's temperature. Methods that look tokens up have no
  distribution to draw from: `rejection` then takes their guesses as certain, and `block` is refused.
- **without the host**: on a GPU several steps run in a row without waiting for Python
  ([multi-step runs](../cuda.md#multi-step-runs)), for chains, and requests without penalties, biases, bans, structured
  output or log-probabilities.
- `a+b` fills one tree with the drafts of several; it takes what trees take.
- A method of your own does what its [needs](../add-a-method.md#needs) say.

## Devices
"""
DEVICES = """
| backend | texts are those of plain decoding | the laws run |
|---|---|---|
| `cpu` | to the bit, always | in `make test`, at every instruction-set level in `tests/kernels` |
| `reference` | to the bit, always | in `make test` |
| `cuda` | to the bit with `deterministic=True`, else up to rounding | in `make test-cuda`; kernels also interpreted |

## Parameters

Each request below is answered by every method on every backend, in one batch with all others, cold and from the cache,
and must equal plain decoding in tokens, text, reason and log-probabilities: {cases} cells, by
`test_every_parameter_in_one_batch_cold_and_hot` in `tests/laws/test_speculation.py`.

"""
ELSEWHERE = """
These do not touch the choice of tokens, or have laws of their own:

"""


def methods() -> list[str]:
    law = importlib.import_module("laws.mix")
    lines = ["| method | needs | `exact` | `rejection` | `block` | `synthetic` | trees | drawn | without the host |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for name in available():
        own = {field.name for field in fields(find(name).Options)}
        drawn = name not in law.FINDING
        source = (
            "a model or head" if "model" in own else "the request" if hasattr(find(name), "DRAFTS_FROM") else "nothing"
        )
        cells = [True, True, drawn, True, "branches" in own, drawn, drawn]
        lines.append(f"| `{name}` | {source} | " + " | ".join("yes" if cell else "no" for cell in cells) + " |")
    return lines


def default(field: Any) -> object:
    return field.default if field.default is not MISSING else field.default_factory()


def parameters() -> tuple[list[str], list[str]]:
    """Rows of parameters that the first law sets, and of those that other tests do."""
    law = importlib.import_module("laws.mix")
    inside, outside = ["| parameter | requests that set it |", "|---|---|"], ["| parameter | tested in |", "|---|---|"]
    for field in fields(SamplingParams):
        usual = default(field)
        setting = [name for name, params in law.MIX.items() if getattr(params, field.name) not in (usual, tuple())]
        if len(setting) == len(law.MIX):
            inside.append(f"| `{field.name}` | all |")
        elif setting:
            inside.append(f"| `{field.name}` | {', '.join(setting)} |")
        else:
            outside.append(f"| `{field.name}` | {', '.join(f'`{name}`' for name in mentioning(field.name))} |")
    return inside, outside


def mentioning(parameter: str) -> list[str]:
    """Tests that set a parameter, of which those of laws and rooms say most."""
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in ("laws", "unit", "integration")
        for path in sorted((TESTS / folder).glob("test_*.py"))
        if re.search(rf"\b{parameter}(=|\"?: )", path.read_text())
    ]
    if not found:
        sys.exit(f"no test sets `{parameter}` of SamplingParams")
    return found[:2]


def page() -> str:
    law = importlib.import_module("laws.mix")
    named = [backend for backend in BACKENDS if backend != "auto"]
    cases = f"{len(available())} methods x {len(named)} backends x {len(law.MIX)} requests = "
    cases += str(len(available()) * len(named) * len(law.MIX))
    inside, outside = parameters()
    parts = [
        HEADER,
        *methods(),
        METHODS + DEVICES.format(cases=cases) + "\n".join(inside),
        ELSEWHERE + "\n".join(outside),
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    sys.path[:0] = [str(TESTS)]
    write_or_check({PAGE: page()})


if __name__ == "__main__":
    main()
