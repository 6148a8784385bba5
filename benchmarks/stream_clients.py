"""Clients that read streamed completions as bytes, many in one process: they cost next to nothing beside the server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LOCALHOST = "127.0.0.1"
Answers = list["StreamedAnswer | str"]  # or why there was none
NOT_TEXT = 2  # events of a stream: the usage and [DONE]


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """What one stream brought."""

    num_tokens: int
    num_events: int  # with text
    asked_at: float  # these by time.monotonic(): before it connected
    began_at: float  # its first text
    ended_at: float


def run_clients(port: int, indices: Sequence[int], prompt: int, answer: int, soak_s: float = 0.0) -> Answers:
    """Some clients at once, each asks once, or until its time is over: each answer, or why there was none."""

    def content(index: int) -> bytes:
        body = {"model": model, "prompt": random_prompt(prompt, (index, time.time())), "max_tokens": answer}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(body).encode()

    async def ask(index: int, first: bytes) -> Answers:
        end, found = time.monotonic() + soak_s, [await _stream(port, first)]
        while time.monotonic() < end:
            found.append(await _stream(port, content(index)))
        return found

    async def ask_all() -> Answers:
        return [one for found in await asyncio.gather(*map(ask, indices, contents)) for one in found]

    model = _model(port)
    contents = [content(index) for index in indices]  # first: no client waits until another has thought of a prompt
    return asyncio.run(ask_all())


def random_prompt(length: int, seed: object) -> list[int]:
    """Token ids that most vocabularies have."""
    chooser = random.Random(repr(seed))
    return [chooser.randrange(1000, 4000) for _ in range(length)]


def _model(port: int) -> str:
    from urllib.request import urlopen

    with urlopen(f"http://{LOCALHOST}:{port}/v1/models", timeout=60) as answer:
        return str(json.load(answer)["data"][0]["id"])


async def _stream(port: int, content: bytes) -> StreamedAnswer | str:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json"
    asked_at = time.monotonic()
    reader, writer = await asyncio.open_connection(LOCALHOST, port)
    writer.write(head + b"\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
    tail, num_events, began_at = b"", 0, 0.0
    try:
        while part := await reader.read(1 << 16):
            num_events += part.count(b"data: ")  # of one cut in two at most, which matters little
            began_at = began_at or (time.monotonic() if num_events else 0.0)
            tail = (tail + part)[-2048:]
    except OSError as error:
        return f"the connection broke: {error}"
    finally:
        writer.close()
    _, found, rest = tail.rpartition(b'"completion_tokens":')
    if not found or b"[DONE]" not in tail:
        return tail[-300:].decode(errors="replace")
    num_tokens = int(rest.lstrip().split(b",")[0].split(b"}")[0])
    return StreamedAnswer(num_tokens, num_events - NOT_TEXT, asked_at, began_at, time.monotonic())


def child_pids(pid: int) -> list[int]:
    """The processes that a process has started and that run."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
