"""Write docs/reference/speculation.md from the methods' Options, or, with --check, see that it is up to date."""

from __future__ import annotations

import inspect
import re
import typing
from dataclasses import MISSING, Field, fields
from pathlib import Path

from outrider.speculation import available, find
from outrider.speculation import vllm_config as keys
from outrider.speculation.config import Common
from pages import write_or_check

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "speculation.md"
HEADER = """# Speculation

A drafter guesses tokens, the model checks all of them in one step. `--speculate METHOD` chooses the drafter,
`--speculate METHOD:key=value,key=value` sets its options; `LLM(model, speculate="METHOD:key=value")` is the same from
Python. `none` is plain decoding. Lists are written with slashes: `rates=0.9/0.5`. A key that a method does not have is
an error that lists those it has. Written by `tools/method_table.py` from the methods themselves.
"""
VERIFICATION = """\
With `verify=exact`, the default, the target chooses its token at each place with its own noise, and a draft is kept
while it is that token: the text is that of plain decoding, to the token, for any drafter, width and temperature.
Drafts of networks are drawn with that noise, unless `draft=greedy` asks for the likeliest tokens.
`rejection` and `block` keep more of the drafts that were drawn (`draft=probabilistic`); the distribution is the
target's, the text is another. `synthetic` keeps drafts at a given rate, whatever they are: for measuring, the text
means nothing. Methods that look tokens up have no distribution to draw from: they refuse `draft=probabilistic` and
`block`. Trees are verified by exact match or by `rejection`; `block` takes chains.

`mean_acceptance_length` counts the tokens that a step gives, including the one that the target adds itself: 1 is plain
decoding, and a width of K can reach K + 1. The rate at a depth is the share of the steps with a draft that deep that
kept it, and thus all before it.
"""
TOGETHER = """\
`a+b`, as in `suffix+eagle3:model=./head,suffix.width=8`, lets several methods fill one tree. `a.key` is an option of
one of them, any other key goes to all that have it, and `width` is the number of tokens of the tree; left out, it has
room for all that they may draft. Which of them guessed what is counted. Nothing of such a tree is drawn: with
`rejection` its tokens count as found.
"""
KEYS = """\
`LLM(model, speculative_config={...})` and `--speculative-config JSON` take vLLM's keys. Without `method`, `model`
decides: an import path is a method of your own, else the checkpoint's configuration says which method it is for. A key
that the method has no use for is an error.
"""


def comments(kind: type) -> dict[str, str]:
    """What stands beside each field in the source, for those of the bases as well."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        for line in inspect.getsource(one).splitlines():
            match = re.match(r"    (\w+): .*?  # (.+)$", line)
            if match:
                found[match[1]] = match[2]
    return found


def default(field: Field[object]) -> str:
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    if value in ((), "", None):
        return ""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"`{value}`"


def choices(kind: object) -> str:
    """The values of a Literal, or of one that may be left out, so that its comment need not repeat them."""
    for one in (kind, *typing.get_args(kind)):
        if typing.get_origin(one) is typing.Literal:
            return f" ({', '.join(f'`{choice}`' for choice in typing.get_args(one))})"
    return ""


def options(kind: type) -> list[str]:
    told, hints = comments(kind), typing.get_type_hints(kind)
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for field in fields(kind):
        meaning = (told[field.name] + choices(hints[field.name])).replace("|", "\\|").replace("None:", "left out:")
        lines.append(f"| `{field.name}` | {default(field)} | {meaning} |")
    return lines


def methods() -> list[str]:
    lines = []
    for name in available():
        module = find(name)
        summary = (inspect.getdoc(module) or "").split("\n\n")[0].replace("\n", " ")
        lines += ["", f"### {name}", "", summary, "", *options(module.Options)]
    return lines


def familiar() -> list[str]:
    lines = [
        "| key | here |",
        "|---|---|",
        "| `method` | the method; `ngram_gpu` is `ngram`, `deepseek_mtp` and its kin are `mtp`, `eagle3` with "
        "`parallel_drafting` is `peagle`, `custom_class` takes `model` |",
    ]
    lines += [f"| `{key}` | `{ours}` |" for key, ours in keys.CALLED.items() if ours != "verify"]
    modes = ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in keys.VERIFICATIONS.items())
    lines.append(f"| `rejection_sample_method` | `verify`: {modes}; left out, `exact` |")
    lines.append(f"| `{keys.BY_REQUESTS}` | `[[from, to, width], ...]`: the width with so many requests in a step |")
    lines += [f"| `{key}` | `{ours}={str(true).lower()}` |" for key, (ours, true, _) in keys.FLAGS.items()]
    lines += [f"| `{key}` | accepted, no effect |" for key in keys.NO_EFFECT]
    for key, (harmless, instead) in keys.REFUSED.items():
        accepted = f"`{str(harmless[0]).lower()}` accepted, else refused" if harmless else "refused"
        lines.append(f"| `{key}` | {accepted}: {instead} |")
    return lines


def page() -> str:
    parts = [HEADER, "## Every method", "", *options(Common), "", VERIFICATION, "## Methods", *methods()]
    return "\n".join([*parts, "", "## Several methods", "", TOGETHER, "## vLLM's keys", "", KEYS, *familiar(), ""])


if __name__ == "__main__":
    write_or_check({PAGE: page()})
