"""The official `openai` client against `kvarn serve --model smollm2 --model minilm`, in another terminal."""

from openai import OpenAI

client = OpenAI(
    base_url="http://127.0.0.1:8000/v1", api_key="none"
)  # a key of `kvarn keys new` where the server has any
question = [{"role": "user", "content": "Name three colours."}]

answer = client.chat.completions.create(model="smollm2", messages=question, max_tokens=40, temperature=0)
print(answer.choices[0].message.content, answer.usage.total_tokens)

for chunk in client.chat.completions.create(model="smollm2", messages=question, max_tokens=40, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
shaped = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "Invent a person, as JSON."}],
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    max_tokens=60,
)
print(shaped.choices[0].message.content)

vectors = client.embeddings.create(model="minilm", input=["a mill", "a windmill"])
print(len(vectors.data), len(vectors.data[0].embedding))
