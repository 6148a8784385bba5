"""Continue one text, then several at once."""

import kvarn

with kvarn.LLM("smollm2") as llm:
    params = kvarn.SamplingParams(max_tokens=32, temperature=0.0)

    completion = llm.generate("The three primary colours are", params)
    print(completion.text)
    print(completion.finish_reason, completion.usage, f"{completion.timings.first_token_s:.2f} s to the first token")

    for completion in llm.generate(["One, two, three,", "A, B, C,"], params):
        print(repr(completion.text))
