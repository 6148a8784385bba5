"""The official `anthropic` client against `kvarn serve --model smollm2`, in another terminal."""

from anthropic import Anthropic

client = Anthropic(
    base_url="http://127.0.0.1:8000", api_key="none"
)  # a key of `kvarn keys new` where the server has any
question = [{"role": "user", "content": "Name three colours."}]

answer = client.messages.create(model="smollm2", max_tokens=40, messages=question, system="Be brief.")
print(answer.content[0].text, answer.stop_reason)

with client.messages.stream(model="smollm2", max_tokens=40, messages=question) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()

print(client.messages.count_tokens(model="smollm2", messages=question).input_tokens)
