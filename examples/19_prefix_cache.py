"""A prefix that survives a restart: asked twice, it is kept on disk, and the next process does not compute it again."""

import tempfile

import kvarn

RULES = "You answer questions about mills. " + "Be brief, be right, and name the part of the mill you mean. " * 12


def ask(llm: kvarn.LLM, question: str) -> kvarn.Completion:
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": question}]
    return llm.chat(messages, kvarn.SamplingParams(max_tokens=24, temperature=0.0))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = kvarn.EngineConfig(context=1024, prefix_cache_dir=folder)  # kvarn serve has one anyway
        for start in (1, 2):
            with kvarn.LLM("smollm2", config=config) as llm:
                for question in ("What turns the stones?", "Where does the flour come out?"):
                    answer = ask(llm, question)
                    usage = answer.usage
                    print(f"start {start}: {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached")
                print(answer.text)
                print(f"read from disk: {llm.stats().disk.read_bytes:,} bytes")


main()
