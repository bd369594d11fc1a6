"""Answers of several runs of `outrider train --answers-only` as one, to learn from all of them at once.

join_answers.py OUT RUN...: RUN is the folder of a run. All must be of one model.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from outrider.train.data.store import Document, Store


def main() -> None:
    out, *runs = map(Path, sys.argv[1:])
    if not runs:
        sys.exit(__doc__)
    sources = [Store(run / "answers") for run in runs]
    headers = [source.header for source in sources if source.header is not None]
    if len(headers) < len(runs) or len({(header.weights, header.vocabulary) for header in headers}) > 1:
        sys.exit("these are not all answers of one model")
    together = {"joined": [dict(header.settings) for header in headers]}
    with Store(out / "answers") as joined:
        joined.claim(replace(headers[0], settings=together))
        number = 0
        for source in sources:
            kept = source.documents()
            for index in range(len(source)):
                joined.append(
                    Document(
                        tokens=source.tokens(index),
                        prompt_length=int(kept.prompt_lengths[index]),
                        number=number,
                        prompt=int(kept.prompts[index]),
                        temperature=float(kept.temperatures[index]),
                        held_out=bool(kept.held_out[index]),
                    )
                )
                number += 1
    sys.stdout.write(f"{number} answers of {Store(out / 'answers').answered} tokens are in `{out}`\n")


if __name__ == "__main__":
    main()
