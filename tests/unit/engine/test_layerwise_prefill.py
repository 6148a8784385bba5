"""The slow lane: a long prompt's chunk goes through the layers in pieces, and nobody's answer changes for it."""

from __future__ import annotations

from kvarn.engine.engine import Engine
from kvarn.request import Request
from kvarn.types import SamplingParams
from tests.submitting import submit
from tests.unit.engine.fake import SimulatedClock, make_engine

DECODING = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
PROMPT = [7, 8, 9] * 300


def busy_engine(**options: object) -> tuple[Engine, list[Request]]:
    """Four requests decode; a step has room for about ten prompt rows."""
    clock = SimulatedClock(step_s=0.004, row_s=0.001)
    engine = make_engine(clock=clock, max_batch_tokens=512, context=1500, num_blocks=800, **options)  # type: ignore[arg-type]
    decoding = [submit(engine, [n], DECODING) for n in range(1, 5)]
    for _ in range(8):
        engine.step()
    return engine, decoding


def answer(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    engine = make_engine(max_batch_tokens=512, context=1500, num_blocks=800)
    request = submit(engine, prompt, params)
    while not request.is_ended:
        engine.step()
    return request.output_ids


def step_until_under_way(engine: Engine) -> None:
    for _ in range(50):
        engine.step()
        if engine.scheduler._layerwise.chunk is not None:
            return
    raise AssertionError("no chunk went into the lane")


def test_a_long_prompt_beside_answers_goes_through_in_pieces_and_gives_the_same_answer() -> None:
    engine, decoding = busy_engine()
    long = submit(engine, PROMPT, DECODING.replace(max_tokens=5))
    step_until_under_way(engine)
    while not long.is_ended:
        engine.step()
    assert long.output_ids == answer(PROMPT, DECODING.replace(max_tokens=5))
    while not all(request.is_ended for request in decoding):
        engine.step()
    for n, request in enumerate(decoding, 1):
        assert request.output_ids == answer([n], DECODING)


def test_a_chunk_under_way_is_given_up_with_its_request() -> None:
    engine, _ = busy_engine()
    long = submit(engine, PROMPT, DECODING)
    step_until_under_way(engine)
    long.is_cancel_requested = True
    engine.step()
    assert engine.scheduler._layerwise.chunk is None
    assert engine.kv.num_tokens(long.id) == 0
    engine.kv.check()


def test_a_preempted_chunk_starts_again_and_ends_the_same() -> None:
    engine, _ = busy_engine()
    long = submit(engine, PROMPT, DECODING.replace(max_tokens=3))
    step_until_under_way(engine)
    engine.scheduler.preempt(long)
    assert engine.scheduler._layerwise.chunk is None
    while not long.is_ended:
        engine.step()
        engine.kv.check()
    assert long.output_ids == answer(PROMPT, DECODING.replace(max_tokens=3))


def test_the_chunk_ends_at_once_when_nobody_is_left_to_be_disturbed() -> None:
    engine, decoding = busy_engine()
    long = submit(engine, PROMPT, DECODING.replace(max_tokens=1))
    step_until_under_way(engine)
    for request in decoding:
        request.is_cancel_requested = True
    engine.step()
    assert engine.scheduler._layerwise.chunk is None
    for _ in range(3):
        engine.step()
    assert long.is_ended


def test_a_short_prompt_does_not_wait_for_the_long_one() -> None:
    engine, _ = busy_engine()
    long = submit(engine, PROMPT, DECODING)
    step_until_under_way(engine)
    short = submit(engine, [5, 6, 7, 8], DECODING.replace(max_tokens=1))
    for _ in range(4):
        engine.step()
    assert short.is_ended
    assert long.num_output == 0


def test_a_chunk_that_fails_in_pieces_is_computed_alone_and_fails_alone() -> None:
    engine, decoding = busy_engine(poison={9: RuntimeError("row of the prompt")})
    long = submit(engine, PROMPT, DECODING)
    while not long.is_ended:
        engine.step()
    assert "row of the prompt" in str(long.error)
    assert not any(request.is_ended for request in decoding)
    assert engine.scheduler._layerwise.chunk is None
    engine.kv.check()
