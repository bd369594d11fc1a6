"""Train a small EAGLE-3 head on the model's own answers, then draft with it; takes a few minutes on a CPU.

    python examples/train_head.py my-head

This shows the steps only: 12 training steps over 1,500 tokens make a poor head. A useful one takes tens of millions of
tokens and minutes on a data-center GPU; `outrider train` has all the settings.
"""

import sys
from pathlib import Path

from outrider import LLM, SamplingParams
from outrider.train.job import Job
from outrider.train.methods import parse
from outrider.train.progress import TextProgress
from outrider.train.run import run

MODEL = "smollm2-135m"
TOPICS = ("the sea", "a castle", "bread", "the moon", "a train", "winter", "a garden", "music")
PROMPTS = [
    f"{ask} {topic}."
    for ask in ("Write two sentences about", "Explain to a child", "Name facts about")
    for topic in TOPICS
]


def train(folder: Path) -> Path:
    """Train and return the folder of the head; a second call resumes an interrupted run."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    head = parse(["eagle3:length=3,draft_vocabulary=2048"])
    job = Job(MODEL, folder, head, prompts=(prompts,), tokens=1500, max_new=64, rows=1, length=128, steps=12)
    result = run(job, TextProgress())
    if not result.finished:
        sys.exit(result.said)
    sys.stdout.write(f"{result.said}\n")
    return folder / "eagle3"


def main() -> None:
    head = train(Path(sys.argv[1]))
    llm = LLM(MODEL, speculate=f"eagle3:model={head},adaptive=no")
    question = [{"role": "user", "content": PROMPTS[0]}]
    output = llm.chat(question, SamplingParams(temperature=0, max_tokens=48))
    assert output.stats is not None
    rate = output.stats.speculation.tokens_per_step
    sys.stdout.write(f"{output.completions[0].text}\n\n{rate:.2f} tokens per step\n")


if __name__ == "__main__":
    main()
