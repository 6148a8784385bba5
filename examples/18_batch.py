"""A batch with the `openai` client against `kvarn serve --model smollm2 --batch-dir batches`, in another terminal.

Without a server, the same file: `kvarn batch requests.jsonl -o answers.jsonl --model smollm2`.
"""

import json
import time

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")


def request(city: str) -> str:
    question = [{"role": "user", "content": f"In which country is {city}? One word."}]
    body = {"model": "smollm2", "messages": question, "max_tokens": 8, "temperature": 0}
    return json.dumps({"custom_id": city, "method": "POST", "url": "/v1/chat/completions", "body": body})


lines = "\n".join(request(city) for city in ("Oslo", "Lima", "Kyoto", "Nairobi"))
file = client.files.create(file=("requests.jsonl", lines.encode()), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")

while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.5)
    batch = client.batches.retrieve(batch.id)
    print(batch.status, batch.request_counts.completed, "of", batch.request_counts.total)

for line in client.files.content(batch.output_file_id).text.splitlines():
    answer = json.loads(line)
    print(answer["custom_id"], "->", answer["response"]["body"]["choices"][0]["message"]["content"])
