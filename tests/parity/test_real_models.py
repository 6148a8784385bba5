"""The reference backend on real files: it continues a sentence and embeds like transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.batch import RowSampling, SampleRows
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.formats.open import open_weights
from kvarn.formats.weights import WeightSource
from kvarn.models.describe import describe
from kvarn.models.spec import Encoder
from tests.assets import gemma3, minilm, smollm2
from tests.running import batch_of, layout_of

pytestmark = pytest.mark.model

SENTENCES = [
    "The mill grinds slowly, but exceedingly small.",
    "A cat sat on the mat.",
    "Ein Satz auf Deutsch, mit Umlauten: äöü.",
    "def add(a, b): return a + b",
    "x",
    "Prices rose by 3.7 % in 2021, the largest increase since 1990, according to the statistics office. " * 4,
]


@pytest.mark.parametrize(("model", "word"), [(smollm2, "Paris"), (gemma3, "France")])
def test_a_greedy_continuation_makes_sense(model: Callable[[], Path], word: str) -> None:
    from kvarn.tokenizer import load_tokenizer

    source = open_weights(model())
    tokenizer = load_tokenizer(source)
    ids = tokenizer.encode("The capital of France is")
    assert word in tokenizer.decode(_continue(source, ids, 8))
    tokenizer.close()
    source.close()


def test_minilm_embeds_like_transformers() -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    from tokenizers import Tokenizer

    folder = minilm()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    texts = [tokenizer.encode(text).ids for text in SENTENCES]
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0).numpy() for ids in texts]
    for ours, theirs in zip(_embed(folder, texts), expected, strict=True):
        assert float(ours @ theirs) / np.linalg.norm(ours) / np.linalg.norm(theirs) >= 0.9999


def _continue(source: WeightSource, ids: list[int], num_tokens: int) -> list[int]:
    described = describe(source)
    backend = ReferenceBackend()
    backend.load(described.spec, described.weights)
    layout = layout_of(described.spec, "f16")
    backend.reserve_kv(layout, 4 * layout.block_bytes)
    table = np.arange(4, dtype=np.int32)[None]
    new, tokens = ids, list[int]()
    for _ in range(num_tokens):
        first = len(ids) + len(tokens) - len(new)
        hidden = backend.forward(batch_of([(new, first)], table))
        sampled = backend.sample(hidden, SampleRows(np.array([len(new) - 1], np.int32), (RowSampling(),)))
        new = [int(sampled.token_ids[0])]
        tokens += new
    return tokens


def _embed(folder: Path, texts: list[list[int]]) -> npt.NDArray[np.float32]:
    described = describe(open_weights(folder))
    config = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert config["pooling_mode_mean_tokens"]
    assert described.spec.generation == Encoder("mean")
    backend = ReferenceBackend()
    backend.load(described.spec, described.weights)
    batch = batch_of([(ids, 0) for ids in texts], np.empty((len(texts), 0), np.int32))
    return backend.pool(backend.forward(batch), batch.row_starts, "mean")
