"""Write docs/reference/kernels.md from the protocol and the cases, or, with --check, see that it is up to date."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path

from outrider.kernels import Kernels
from outrider.kernels.cases import CASES, TOLERANCE
from outrider.kernels.quantization import FORMATS
from pages import write_or_check

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "kernels.md"
HEADER = """# Kernels

Every operation that the engine asks of a device. The backends `cpu`, `cuda` and `reference` define all of them. The
cases are run on each: at every instruction-set level that the machine offers, on a GPU, or, without one, through
Triton's interpreter. Written by `tools/kernel_table.py` from the protocol and from `kernels/cases`.
"""


def operations() -> list[str]:
    lines = ["| operation | meaning | cases |", "|---|---|---:|"]
    counts = Counter(case.op for case in CASES)
    for name, member in vars(Kernels).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            meaning = (inspect.getdoc(member) or "").splitlines()[0]
            lines.append(f"| `{name}` | {meaning.replace('|', chr(92) + '|')} | {counts[name]} |")
    return lines


def formats() -> list[str]:
    lines = ["| format | weights in a block | bytes of a block | largest error, over the RMS of the result |"]
    lines.append("|---|---:|---:|---:|")
    for kind, form in FORMATS.items():
        lines.append(f"| `{kind}` | {form.elements} | {form.bytes} | {TOLERANCE[kind]:g} |")
    return lines


def page() -> str:
    return "\n".join([HEADER, *operations(), "", "## Formats of matrices", "", *formats(), ""])


if __name__ == "__main__":
    write_or_check({PAGE: page()})
