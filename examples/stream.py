"""Stream two chat answers at the same time from one engine."""

import asyncio
import sys

from outrider import AsyncLLM, SamplingParams

QUESTIONS = ("Why is the sky blue?", "Why is the sea salty?")


async def ask(llm: AsyncLLM, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    length = 0
    async for output in llm.chat(messages, SamplingParams(temperature=0, max_tokens=64)):
        text = output.completions[0].text
        sys.stdout.write(f"[{question}] {text[length:]!r}\n")
        length = len(text)


async def main() -> None:
    llm = AsyncLLM("smollm2-135m")
    try:
        await asyncio.gather(*(ask(llm, question) for question in QUESTIONS))
    finally:
        llm.close()


if __name__ == "__main__":
    asyncio.run(main())
