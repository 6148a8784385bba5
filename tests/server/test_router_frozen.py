"""A router before a replica that is frozen: its connections stay open, and nothing comes."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.server.routed import CHAT, REPLICA, body, cluster

NUM_REQUESTS = 4  # in turn to both replicas


def test_a_frozen_replica_costs_its_streams_only(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, "--policy", "round_robin") as both, both.router.client() as client:
        assert {client.post(CHAT, json=body("hi")).headers[REPLICA] for _ in range(4)} == {"0", "1"}
        asked = body("Go on, please. " * 20, max_tokens=1500, stream=True, ignore_eos=True)
        with client.stream("POST", CHAT, json=asked) as stream, ThreadPoolExecutor(NUM_REQUESTS) as threads:
            number, parts = int(stream.headers[REPLICA]), stream.iter_raw()
            read = next(parts)
            frozen = both.replicas[number].process
            frozen.send_signal(signal.SIGSTOP)
            try:
                others = threads.map(lambda n: client.post(CHAT, json=body(f"Question {n}")), range(NUM_REQUESTS))
                answers = [(one.status_code, one.headers.get(REPLICA)) for one in others]
                read += b"".join(parts)
            finally:
                frozen.send_signal(signal.SIGCONT)
        assert answers == [(200, str(1 - number))] * NUM_REQUESTS
        assert both.router.metric("kvarn_router_retries_total") >= 1, "none was asked of the frozen replica"
        assert read.endswith(b"data: [DONE]\n\n")
        assert read.count(b'"code":"replica_lost"') == 1
        both.router.until_usable(2)  # it goes on, and is asked again
