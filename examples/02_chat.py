"""Hold a conversation: the model's own chat template turns messages into tokens."""

import kvarn

messages = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "Why is the sky blue?"},
]

with kvarn.LLM("smollm2") as llm:
    params = kvarn.SamplingParams(max_tokens=60, temperature=0.7, seed=1)
    answer = llm.chat(messages, params)
    print(answer.text)

    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And at sunset?"}]
    print(llm.chat(messages, params).text)
