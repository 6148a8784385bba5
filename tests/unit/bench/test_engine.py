"""`kvarn bench engine` drives caches of both kinds of layers."""

from __future__ import annotations

from kvarn.bench.engine import measure
from kvarn.engine.client import EngineClient
from kvarn.kv.group import WindowShape
from tests.unit.engine.fake import VOCAB, make_engine


def test_the_bare_loop_runs_where_layers_keep_a_window_only() -> None:
    client = EngineClient(make_engine(num_blocks=200, window=WindowShape(8, 100, 16)))
    assert measure(client, VOCAB, requests=2, num_steps=4, rounds=1).straight_ms > 0
    client.close()
