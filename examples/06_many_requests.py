"""Batches, handles, callbacks, several answers to one prompt, and what the engine says about itself."""

import kvarn

with kvarn.LLM("smollm2") as llm:
    params = kvarn.SamplingParams(max_tokens=24, temperature=0.8, seed=1)

    # A list runs as one batch; all prompts share the work of their common beginning.
    rules = "You are a friendly miller. Answer in one short sentence.\n"
    for completion in llm.generate([f"{rules}Q: {q}\nA:" for q in ("Who are you?", "What do you grind?")], params):
        print(completion.text.strip(), f"[{completion.usage.cached_tokens} tokens were not computed again]")

    # submit() returns at once. A higher priority runs first; a deadline ends what takes too long.
    urgent = llm.submit("The capital of France is", params.replace(priority=10, deadline_s=30.0))
    relaxed = llm.submit("A long story:", params, on_token=lambda event: print(event.text, end="", flush=True))
    print(f"\n{urgent.id} is {urgent.state}: {urgent.result(timeout=60).text!r}")
    relaxed.cancel()
    print(f"\n{relaxed.id}: {relaxed.result().finish_reason}")

    # n answers to one prompt, which is computed once.
    completion = llm.generate("My favourite colour is", params.replace(n=3, max_tokens=8))
    for choice in (completion, *completion.alternatives):
        print(repr(choice.text))

    print(llm.stats())
