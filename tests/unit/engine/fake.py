"""A small real engine over FakeBackend: byte tokens, id 0 ends an answer."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvarn.backends.batch import Batch, KVLayout
from kvarn.backends.fake import FakeBackend, Fault, Rule, hashed
from kvarn.config import EngineConfig
from kvarn.decoding.autoregressive import AutoregressiveDecoder
from kvarn.decoding.sampling_state import SamplingDefaults
from kvarn.engine.admission import Admission
from kvarn.engine.engine import Engine
from kvarn.engine.stream import Stream
from kvarn.kv.cache import KVCache
from kvarn.kv.group import WindowShape
from kvarn.request import Request
from kvarn.types import Completion, SamplingParams, TokenEvent
from tests.submitting import submit

EOS = 0
VOCAB = 256
LAYOUT = KVLayout(4, ((1, 8),))


class ByteText:
    """Token i is the byte i; a character comes out when it is whole."""

    def __init__(self, _starts_text: bool, _visible_ids: frozenset[int]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id]))

    def push_all(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class SimulatedClock:
    """Time that passes only when told to; with step_s or row_s, also in every forward."""

    def __init__(self, step_s: float = 0.0, row_s: float = 0.0) -> None:
        self.now = 100.0
        self.step_s = step_s
        self.row_s = row_s

    def __call__(self) -> float:
        return self.now

    def on_forward(self, batch: Batch, share: float) -> float:
        seconds = (self.step_s + self.row_s * len(batch.token_ids)) * share
        self.now += seconds
        return seconds


def make_engine(
    rule: Rule | None = None,
    *,
    num_blocks: int = 64,
    context: int = 200,
    max_batch_tokens: int = 16,
    faults: Mapping[int, Fault] | None = None,
    poison: Mapping[int, Fault] | None = None,
    defaults: SamplingDefaults | None = None,
    clock: SimulatedClock | None = None,
    runs_ahead: bool = False,
    window: WindowShape | None = None,
    hash_key: bytes | None = None,
    **options: Any,
) -> Engine:
    """options go to EngineConfig. Without a clock, time is real."""
    config = EngineConfig(block_size=LAYOUT.block_size, max_batch_tokens=max_batch_tokens, **options)
    backend = FakeBackend(VOCAB, rule, faults, poison, None if clock is None else clock.on_forward)
    backend.runs_ahead = runs_ahead
    layout = LAYOUT if window is None else replace(LAYOUT, num_window_blocks=window.num_blocks)
    backend.window = 0 if window is None else window.num_tokens
    num_blocks = backend.reserve_kv(layout, num_blocks * layout.block_bytes)
    kv = KVCache(num_blocks, layout.block_size, window=window, hash_key=hash_key)
    time_of = time.perf_counter if clock is None else clock
    decoder = AutoregressiveDecoder(backend, VOCAB, (EOS,), defaults or SamplingDefaults(), clock=time_of)
    admission = Admission(VOCAB, min(context, kv.max_tokens), decoder, kv)
    stream = Stream(ByteText, (EOS,))
    return Engine(backend, decoder, kv, stream=stream, admission=admission, config=config, clock=time_of)


def saying(answer: str | bytes, prompt: str | bytes) -> Rule:
    """A model that answers one prompt with given bytes, then ends."""
    data, start = _bytes(answer), len(_bytes(prompt))
    return lambda tokens: data[len(tokens) - start] if len(tokens) - start < len(data) else EOS


def expected(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the hashing model says, computed without any engine."""
    tokens, rule = list(prompt), hashed(VOCAB)
    for _ in range(num_tokens):
        tokens.append(rule(tokens))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


def is_idle(engine: Engine) -> bool:
    """Nothing to do, and every block given back."""
    return not engine.has_work and engine.kv.num_free == engine.kv.num_blocks


def tokens_of(text: str | bytes) -> list[int]:
    return list(_bytes(text))


def run_to_end(engine: Engine, max_steps: int = 10_000) -> list[TokenEvent]:
    """Step until nothing is left, checking the cache after each step."""
    events: list[TokenEvent] = []
    for _ in range(max_steps):
        if not engine.has_work:
            return events
        events += engine.step()
        engine.kv.check()
    raise AssertionError("the engine does not come to an end")


def complete(engine: Engine, prompt: str | bytes | Sequence[int], params: SamplingParams | None = None) -> Completion:
    """The completion of one prompt, alone; greedy unless params say otherwise."""
    ids = tokens_of(prompt) if isinstance(prompt, str | bytes) else prompt
    request = submit(engine, ids, params or SamplingParams(temperature=0.0, max_tokens=20))
    return completion_of(run_to_end(engine), request)


def completion_of(events: Sequence[TokenEvent], request: Request) -> Completion:
    """The completion in a request's last event, after checking that the events tell the same story."""
    mine = [event for event in events if event.request_id == request.id]
    assert [event.finish_reason is not None for event in mine] == [False] * (len(mine) - 1) + [True]
    completion = mine[-1].completion
    assert completion is not None
    assert "".join(event.text for event in mine) == completion.text
    assert tuple(event.token_id for event in mine if event.token_id is not None) == completion.token_ids
    return completion


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
