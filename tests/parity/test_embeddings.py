"""MiniLM on the native backend beside transformers with mean pooling, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvarn import LLM, EngineConfig
from tests.assets import minilm

if TYPE_CHECKING:
    from tests.conftest import Record, Size

pytestmark = pytest.mark.model

NUM_SENTENCES = 200


def _sentences() -> list[str]:
    """Sentences of every length from the language reference behind help()."""
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    sentences = [sentence.strip() + "." for sentence in text.split(". ") if sentence.strip()]
    return sentences[:: len(sentences) // NUM_SENTENCES][:NUM_SENTENCES]


def test_embeddings_point_where_transformers_points(size: Size, record: Record) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    sentences = _sentences()
    assert len(sentences) == NUM_SENTENCES
    sentences = sentences[:: size(8, 1)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm())
    model = transformers.AutoModel.from_pretrained(minilm(), dtype=torch.float32).eval()
    expected = []
    with torch.no_grad():
        for sentence in sentences:
            states = model(**tokenizer(sentence, return_tensors="pt", truncation=False)).last_hidden_state[0]
            expected.append(states.mean(dim=0).numpy())
    theirs = np.stack(expected) / np.linalg.norm(expected, axis=1, keepdims=True)
    least = {}
    for weights in ("file", "q8_0"):
        with LLM(str(minilm()), config=EngineConfig(encoder_weights=weights)) as llm:
            least[weights] = float((llm.embed(sentences) * theirs).sum(axis=1).min())
    record("minilm-cosine", {"least": least["file"], "least_q8_0": least["q8_0"], "sentences": len(sentences)})
    assert least["file"] >= 0.9999
    assert least["q8_0"] >= 0.999
