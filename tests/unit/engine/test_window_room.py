"""What is reserved for layers with windows lets the longest request run, whatever the size of blocks and steps."""

from __future__ import annotations

import pytest

from kvarn.engine.client import EngineClient
from kvarn.engine.embed_score import score_tokens
from kvarn.engine.load import _window_shape
from kvarn.kv.cache import KVCache
from kvarn.kv.group import WindowShape
from kvarn.kv.table import blocks_for
from kvarn.models.cache_cost import CacheCost
from tests.submitting import submit_to
from tests.unit.engine.fake import make_engine
from tests.unit.engine.stepping import ENDLESS

NUM_TOKENS = 4001
TOKENS = [(7 * i) % 250 + 1 for i in range(50)]


@pytest.mark.parametrize("size", [1, 16, 64, 256])
@pytest.mark.parametrize("step", [1, 7, 512])
def test_one_request_finds_blocks_to_its_end(size: int, step: int) -> None:
    cost = CacheCost(1, 5, window=100, least_window_tokens=100 + step)
    shape = _window_shape(cost, cost.split(cost.least_bytes(NUM_TOKENS), NUM_TOKENS), size, step)
    assert shape is not None
    cache = KVCache(blocks_for(NUM_TOKENS, size), size, window=shape)
    token_ids = list(range(NUM_TOKENS))
    for end in range(step, NUM_TOKENS + 1, step):
        assert cache.extend_to("a", end) is not None
        cache.publish("a", token_ids, num_computed=end)
        cache.advance("a", end)
    cache.check()
    assert shape.num_blocks * size <= 100 + step + 5 * size


def test_a_score_waits_until_windows_have_room_beside_those_that_run() -> None:
    window = WindowShape(num_tokens=16, num_blocks=12, step_tokens=16)
    client = EngineClient(make_engine(num_blocks=400, window=window))
    running = [submit_to(client, TOKENS[i : i + 8], ENDLESS) for i in range(3)]
    scores = client.compute(lambda engine: score_tokens(engine.backend, engine.kv, TOKENS, 16), len(TOKENS)).result(30)
    assert len(scores) == len(TOKENS) - 1
    assert [len(handle.result(30).token_ids) for handle in running] == [ENDLESS.max_tokens] * 3
    client.close()
