"""Prompts with long texts in them, which are rare among instructions: what the model wrote, given back to it.

make_prompts.py MODEL ANSWERS OUT --count N: ANSWERS is a folder of `outrider train`, OUT a .jsonl file for `--prompts`.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from outrider.tokenizer import Tokenizer
from outrider.train.data.store import Store
from outrider.weights import open_checkpoint

TASKS = (
    "Summarize the following text.\n\n{texts}",
    "{texts}\n\nWrite a short summary of the above.",
    "What are the main points of this text?\n\n{texts}",
    "Read the passages and answer the question.\n\n{texts}\n\nQuestion: {question}",
    "Answer with the help of these documents.\n\n{texts}\n\nQ: {question}\nA:",
    "{question}\n\nHere is what is known:\n\n{texts}",
    "Rewrite this in simpler words:\n\n{texts}",
)
PASSAGES = (1, 5)  # in one prompt
TOKENS = 850  # of one prompt at most, so that an answer fits behind it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("answers", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    tokenizer = Tokenizer.open(open_checkpoint(asked.model).tokenizer_source)
    store = Store(asked.answers / "answers")
    documents, probability = store.documents(), random.Random(asked.seed)
    shown = [number for number in range(len(store)) if not documents.held_out[number]]

    def text(number: int, question: bool) -> str:
        cut = int(documents.prompt_lengths[number])
        ids = store.tokens(number)[:cut] if question else store.tokens(number)[cut:]
        return tokenizer.decode(ids.tolist()).strip()

    def question(number: int) -> str:
        """The user's turn alone."""
        return text(number, True).rpartition("user\n")[2].removesuffix("assistant").strip()

    with asked.out.open("w", encoding="utf-8") as out:
        made = 0
        while made < asked.count:
            chosen = probability.sample(shown, probability.randint(*PASSAGES))
            passages = [text(number, False) for number in chosen]
            if min(map(len, passages)) < 200:
                continue
            prompt = probability.choice(TASKS).format(texts="\n\n".join(passages), question=question(chosen[0]))
            if len(tokenizer.encode(prompt)) <= TOKENS:
                out.write(json.dumps({"prompt": prompt}) + "\n")
                made += 1


if __name__ == "__main__":
    main()
