"""Two servers behind a router, each conversation where its prefix lies: with the `openai` client."""

import subprocess
import sys
import tempfile
from pathlib import Path

from openai import OpenAI

key = Path(tempfile.mkdtemp()) / "cluster.key"
key.write_text("any 32 or more secret characters, the same for all")


def start(*command: str) -> tuple[subprocess.Popen[str], str]:
    """A process of Kvarn and its address, once it has printed that it is ready."""
    line = [sys.executable, "-m", "kvarn", *command, "--port", "0", "--cluster-key", str(key)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return process, process.stdout.readline().split()[-1]


servers = [start("serve", "--model", "smollm2") for _ in range(2)]
replicas = [part for _, url in servers for part in ("--replica", url)]
router, address = start("route", *replicas)
client = OpenAI(base_url=f"{address}/v1", api_key="none")
model = client.models.list().data[0].id

for name in ("Ada", "Bo", "Cleo"):
    talk = [{"role": "system", "content": f"You speak with {name}, who likes short answers. " * 8}]
    for question in ("Name a colour.", "And another?"):
        talk.append({"role": "user", "content": question})
        answer = client.chat.completions.with_raw_response.create(model=model, messages=talk, max_tokens=12)
        completion = answer.parse()
        talk.append({"role": "assistant", "content": completion.choices[0].message.content})
        cached = completion.usage.prompt_tokens_details.cached_tokens
        print(name, "at replica", answer.headers["x-kvarn-replica"], "with", cached, "cached tokens")

for process, _ in (*servers, (router, address)):
    process.terminate()
