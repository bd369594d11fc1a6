"""Continue two prompts in one batch. Run `outrider pull smollm2-135m` first."""

import sys

from outrider import LLM, SamplingParams


def main() -> None:
    llm = LLM("smollm2-135m")
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=64, seed=1)
    for output in llm.generate(["The sea is", "def fibonacci(n):"], params):
        sys.stdout.write(f"{output.prompt}{output.completions[0].text}\n\n")


if __name__ == "__main__":
    main()
