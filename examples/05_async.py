"""Many conversations at once with asyncio; each gets exactly the answer it would get alone."""

import asyncio

import kvarn

QUESTIONS = ["Why is the sky blue?", "What is a mill?", "Name three rivers."]


async def answer(llm: kvarn.AsyncLLM, question: str) -> str:
    params = kvarn.SamplingParams(max_tokens=40, temperature=0.7, seed=1)
    text = ""
    async for event in llm.stream([{"role": "user", "content": question}], params):
        text += event.text
    return text


async def main() -> None:
    async with kvarn.AsyncLLM("smollm2") as llm:
        for question, text in zip(QUESTIONS, await asyncio.gather(*(answer(llm, q) for q in QUESTIONS)), strict=True):
            print(f"{question}\n    {text.strip()}")

        # Leaving the loop closes the iterator, and that cancels the request within one step.
        async for event in llm.stream("Once upon a time", kvarn.SamplingParams(max_tokens=1000, seed=7)):
            print(event.text, end="", flush=True)
            if event.index == 20:
                break
        print(" ...")


asyncio.run(main())
