"""Print tokens as they are chosen, and stop early."""

import kvarn

with kvarn.LLM("smollm2") as llm:
    params = kvarn.SamplingParams(max_tokens=80, temperature=0.0, stop="\n\n")
    for event in llm.stream([{"role": "user", "content": "Count from one to ten."}], params):
        print(event.text, end="", flush=True)
    print(f"\n[{event.finish_reason}]")

    # Leaving the block cancels what is left of the answer.
    with llm.stream("Once upon a time", kvarn.SamplingParams(max_tokens=1000, seed=7)) as events:
        for event in events:
            print(event.text, end="", flush=True)
            if event.index == 20:
                break
    print(" ...")
