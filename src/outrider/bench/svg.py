"""What charts share: an SVG that needs nothing else, its colours on light and dark pages, and its texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

WIDTH, MARGIN = 960, 28
LIGHT = ("#2467c4", "#d2571f", "#12876a", "#8748c9", "#c22f55", "#a8780a", "#56687a", "#c14ba6")
DARK = ("#74aef5", "#f3926a", "#4fcaa5", "#bd97f2", "#f27f98", "#e2b64c", "#a5b4c4", "#ee96d6")
COLOURS = len(LIGHT)  # that can be told apart
DASHES = ("none", "6 4", "2 4", "8 3 2 3")
LETTER = 7.2  # width of a letter, nearly, in a line of 12


def drawing(parts: Iterable[str], height: int, label: str, more_style: str = "") -> str:
    """The parts on a page of the reader's own brightness. label: what it shows, for those who do not see it."""
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{label}">\n<style>{style()}{more_style}</style>\n'
        f'<rect class="page" width="{WIDTH}" height="{height}"/>\n{inner}\n</svg>\n'
    )


def style() -> str:
    def colours(chosen: Sequence[str]) -> str:
        return "".join(f".c{number}{{color:{colour}}}" for number, colour in enumerate(chosen))

    dashes = "".join(f".t{shade}{{stroke-dasharray:{dash}}}" for shade, dash in enumerate(DASHES))
    pale = "".join(f".bar.t{shade}{{opacity:{1 - 0.25 * shade:g}}}" for shade in range(len(DASHES)))
    return (
        "text{font:12px system-ui,sans-serif;fill:#1f2630}.title{font-size:18px;font-weight:600}"
        ".head{font-weight:600}.quiet{fill:#5d6977}.number{font-size:11px;fill:#5d6977}.page{fill:#fff}"
        ".grid{stroke:#dfe4ea}.axis{stroke:#8a96a3}.any{color:#5d6977}"
        ".line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}"
        ".dot,.bar{fill:currentColor}"
        f"{colours(LIGHT)}{dashes}{pale}"
        "@media(prefers-color-scheme:dark){text{fill:#e6eaef}.quiet,.number{fill:#9aa6b2}.page{fill:#14181d}"
        f".any{{color:#9aa6b2}}.grid{{stroke:#2a323b}}.axis{{stroke:#65717e}}{colours(DARK)}}}"
    )


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'
