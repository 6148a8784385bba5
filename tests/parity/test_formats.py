"""Real models: equal to what the gguf and safetensors packages read, and opened quickly."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open

from kvarn.formats.open import open_weights
from tests.assets import gemma3, llama_cpp_models, minilm, qwen_coder, smollm2

pytestmark = pytest.mark.model
LONG = pytest.mark.long


@pytest.mark.parametrize("fetch", [smollm2, pytest.param(qwen_coder, marks=LONG), pytest.param(gemma3, marks=LONG)])
def test_a_model_reads_as_in_the_gguf_package(fetch: Callable[[], Path]) -> None:
    source, oracle = open_weights(fetch()), gguf.GGUFReader(fetch())
    keys = {key for key in oracle.fields if not key.startswith("GGUF.")}
    assert set(source.metadata) == keys
    for key in keys:
        if len(oracle.fields[key].data) < 1000:  # the oracle needs seconds for a vocabulary
            assert source.metadata[key] == oracle.fields[key].contents(), key
    tokens = oracle.fields["tokenizer.ggml.tokens"]
    ids = range(0, len(tokens.data), 997)
    assert len(source.metadata["tokenizer.ggml.tokens"]) == len(tokens.data)
    assert [source.metadata["tokenizer.ggml.tokens"][i] for i in ids] == [tokens.contents(i) for i in ids]
    assert list(source.tensors) == [tensor.name for tensor in oracle.tensors]
    seen = set()
    for tensor in oracle.tensors:
        info = source.tensors[tensor.name]
        assert list(info.shape) == [int(size) for size in tensor.shape[::-1]]
        assert info.num_bytes == tensor.n_bytes
        if (info.type, len(info.shape)) not in seen and info.num_values < 4_000_000:
            seen.add((info.type, len(info.shape)))
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(info.shape)
            np.testing.assert_array_equal(source.array(tensor.name), expected)
    assert len(seen) >= 2


def test_every_vocabulary_of_the_collection_opens_and_decodes() -> None:
    paths = sorted(llama_cpp_models().glob("ggml-vocab-*.gguf"))
    assert len(paths) >= 10
    for path in paths:
        source = open_weights(path)
        tokens = source.metadata["tokenizer.ggml.tokens"]
        assert not source.tensors
        assert len(list(tokens)) == len(tokens) > 10_000
        assert len(source.metadata["tokenizer.ggml.token_type"]) == len(tokens)


def test_minilm_reads_as_in_the_safetensors_package() -> None:
    source = open_weights(minilm())
    with safe_open(minilm() / "model.safetensors", framework="np") as oracle:
        assert set(source.tensors) == set(oracle.keys()) - {"embeddings.position_ids"}
        for name in sorted(source.tensors)[::10]:
            np.testing.assert_array_equal(source.array(name), oracle.get_tensor(name))
    assert source.metadata["hf"]["model_type"] == "bert"


@pytest.mark.parametrize(("fetch", "limit_s"), [(smollm2, 0.06), (qwen_coder, 0.2)])
def test_a_model_opens_quickly(fetch: Callable[[], Path], limit_s: float) -> None:
    times = []
    for _ in range(5):
        begin = time.process_time()  # other work on the machine does not count
        open_weights(fetch()).close()
        times.append(time.process_time() - begin)
    assert min(times) <= limit_s
