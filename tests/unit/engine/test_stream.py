"""Control tokens a request wants to see are part of its text, and of nobody else's."""

from __future__ import annotations

import pytest

from kvarn.engine.client import EngineClient
from kvarn.engine.handle import OutputCollector
from kvarn.engine.load import text_stream
from kvarn.engine.submission import Submission
from kvarn.tokenizer.from_gguf import tokenizer_from_gguf
from kvarn.types import SamplingParams
from tests.unit.engine.fake import make_engine, saying
from tests.unit.tokenizer.vocabularies import sentence_piece

BOS = 1  # a control token of this vocabulary, whose text is <s>
LETTER = 3 + ord("b")


@pytest.mark.parametrize(("visible_ids", "text"), [(frozenset({BOS}), "<s>b"), (frozenset(), "b")])
def test_visible_control_tokens_are_text_in_every_choice(visible_ids: frozenset[int], text: str) -> None:
    engine = make_engine(saying(bytes([BOS, LETTER]), b"?"))
    engine.stream = text_stream(tokenizer_from_gguf(sentence_piece()))
    client = EngineClient(engine)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=2, n=2)
        (handle,) = client.submit_all([Submission(list(b"?"), params, visible_ids=visible_ids)], OutputCollector())
        first = handle.result(timeout=60)
        assert [first.text, *(other.text for other in first.alternatives)] == [text, text]
    finally:
        client.close()
