"""Prompts that ask for a translation into English, which are rare among instructions.

make_translations.py OUT LANGUAGE:COUNT:FOLDER...: sentences of that language from the pages (.html) and plain texts
below FOLDER, such as translated manuals and collections of quotations. OUT is a .jsonl file for `--prompts`.
"""

from __future__ import annotations

import argparse
import html
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

TASKS = (
    "Translate {language} to English: {sentence}",
    "Translate from {language} to English: {sentence}",
    "Translate this {language} sentence into English.\n\n{sentence}",
    "What does this {language} sentence mean in English?\n{sentence}",
    "Give me an English translation of: {sentence}",
    "{sentence}\n\nTranslate the above to English.",
    "Translate the following {language} text to English:\n\n{sentence}",
)
LENGTHS = range(40, 261)  # characters of a sentence
LETTERS = 0.88  # of it at least, spaces included
SPACED = 0.25  # of the sentences are written with spaces before their marks, as corpora often have them
ENGLISH = re.compile(r"\b(the|of|and|to|is|in|that|for|you|this|with|are|on|be|as|it|or|from|by)\b", re.IGNORECASE)
MOST_ENGLISH = 0.12  # of the words: manuals keep untranslated passages
PARAGRAPH = re.compile(r"<p[^>]*>(.*?)</p>", re.DOTALL)
CODE = re.compile(r"<(script|style|pre|code|kbd)[^>]*>.*?</\1>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
END = re.compile(r"(?<=[.!?])\s+(?=[A-ZÄÖÜÉÈ„\"¿¡])")


def texts(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*")):
        if file.suffix == ".html" and file.is_file():
            for paragraph in PARAGRAPH.findall(file.read_text("utf-8", "ignore")):
                yield html.unescape(TAG.sub(" ", CODE.sub(" ", paragraph)))
        elif file.suffix in ("", ".txt", ".u8") and file.is_file():
            yield from file.read_text("utf-8", "ignore").split("\n%\n")  # how collections of quotations divide them


def sentences(folder: Path) -> list[str]:
    """Each once, in the order in which they stand."""
    found = (part.strip() for text in texts(folder) for part in END.split(" ".join(text.split())))
    return [one for one in dict.fromkeys(found) if is_sentence(one) and is_foreign(one)]


def is_sentence(text: str) -> bool:
    letters = sum(letter.isalpha() or letter == " " for letter in text)
    return len(text) in LENGTHS and text[0].isupper() and text[-1] in ".!?" and letters >= LETTERS * len(text)


def is_foreign(text: str) -> bool:
    return len(ENGLISH.findall(text)) < MOST_ENGLISH * len(text.split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("sources", nargs="+", metavar="LANGUAGE:COUNT:FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    probability = random.Random(asked.seed)
    prompts = []
    for source in asked.sources:
        language, count, folder = source.split(":", 2)
        found = sentences(Path(folder))
        for sentence in probability.sample(found, min(int(count), len(found))):
            spaced = re.sub(r" ?([.,])", r" \1", sentence) if probability.random() < SPACED else sentence
            prompts.append(probability.choice(TASKS).format(language=language, sentence=spaced))
    probability.shuffle(prompts)
    with asked.out.open("w", encoding="utf-8") as out:
        for prompt in prompts:
            out.write(json.dumps({"prompt": prompt}) + "\n")


if __name__ == "__main__":
    main()
