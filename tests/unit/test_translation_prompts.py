"""Prompts for translations: sentences of pages and quotations, in the language that was asked for."""

from __future__ import annotations

from pathlib import Path

from make_translations import sentences

GERMAN = "Der Zug nach Hamburg fährt heute leider erst am späten Abend."
QUOTED = "Wer den Fluss nicht kennt, der soll ihn nicht im Dunkeln queren."
ENGLISH = "The option is kept in the list of all that you have set by this page."


def test_only_whole_foreign_sentences_are_taken(tmp_path: Path) -> None:
    page = f"<p>{GERMAN} {ENGLISH} Zu kurz.</p><p>{GERMAN}</p><pre>{QUOTED}</pre><p><code>a = 1</code> ohne Anfang</p>"
    (tmp_path / "page.html").write_text(page, "utf-8")
    (tmp_path / "quotations").write_text(f"{QUOTED}\n%\n{ENGLISH}\n", "utf-8")
    assert sentences(tmp_path) == [GERMAN, QUOTED]
