"""A server on Ray with two replicas (`pip install "kvarn[ray]"`), and where conversations went: at http://127.0.0.1."""

import subprocess
import sys

from openai import OpenAI

command = ["deploy", "ray", "--address", "local", "--model", "smollm2", "--min-replicas", "2", "--port", "0"]
deployed = subprocess.Popen(
    [sys.executable, "-m", "kvarn", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
)
address = next(line for line in deployed.stdout if line.startswith("kvarn: serving")).split()[-1]
print("on", address)
client = OpenAI(base_url=f"{address}/v1", api_key="none")

for name in ("Ada", "Bo", "Cleo"):
    talk = [{"role": "system", "content": f"You speak with {name}, who likes short answers. " * 8}]
    for question in ("Name a colour.", "And another?"):
        talk.append({"role": "user", "content": question})
        answer = client.chat.completions.with_raw_response.create(model="smollm2", messages=talk, max_tokens=12)
        completion = answer.parse()
        talk.append({"role": "assistant", "content": completion.choices[0].message.content})
        cached = completion.usage.prompt_tokens_details.cached_tokens
        print(name, "at replica", answer.headers["x-kvarn-replica"], "with", cached, "cached tokens")

deployed.terminate()
deployed.wait()
