"""Two servers, one Milvus: what one of them stores, the other finds. Needs kvarn[retrieval,milvus]."""

import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from urllib.request import Request, urlopen

MILVUS = "http://127.0.0.1:19539"  # here milvus-lite's server; in earnest the address of a cluster

lite = [sys.executable, "-m", "milvus_lite", "server", "--host", "127.0.0.1", "--port", "19539", "--max-workers", "1"]
milvus = subprocess.Popen([*lite, "--data-dir", tempfile.mkdtemp()], stdout=subprocess.DEVNULL)


def start() -> tuple[subprocess.Popen[str], str]:
    """A server and its address, once it has printed that it is ready."""
    line = [sys.executable, "-m", "kvarn", "serve", "--model", "minilm", "--port", "0", "--milvus-uri", MILVUS]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return process, process.stdout.readline().split()[-1]


def post(url: str, body: dict[str, object]) -> dict[str, object]:
    return json.load(urlopen(Request(url, json.dumps(body).encode(), {"content-type": "application/json"})))


(one, first), (two, second) = start(), start()
for _ in range(50):  # until Milvus listens
    with suppress(OSError):
        post(f"{first}/v1/collections", {"name": "notes"})
        break
    time.sleep(1)
texts = ["A mill grinds grain into flour.", "Astronomers count stars."]
print(post(f"{first}/v1/collections/notes/documents", {"documents": [{"text": text} for text in texts]}))
print(post(f"{second}/v1/collections/notes/search", {"query": "Who looks at the sky?", "k": 1})["data"])
for process in (one, two, milvus):
    process.terminate()
