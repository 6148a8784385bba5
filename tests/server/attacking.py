"""Clients that send one body again and again, in a process of their own.

`python -m tests.server.attacking PORT KEY PATH` reads the body from stdin; SIGTERM ends it, and it prints the statuses.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from contextlib import suppress

from tests.server.edge_client import Client

NUM_ATTACKERS = 4
LEAVES_AFTER_S = 2.0


def main() -> None:
    port, key, path = sys.argv[1:]
    body = sys.stdin.buffer.read()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    statuses: list[int] = []

    def attack() -> None:
        while not is_over.is_set():
            with suppress(OSError, ValueError), Client(int(port), timeout_s=LEAVES_AFTER_S) as client:
                client.send(head.encode() + body)
                statuses.append(client.reply().status)

    threads = [threading.Thread(target=attack) for _ in range(NUM_ATTACKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
