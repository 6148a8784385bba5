"""Adapters against transformers with merged weights W + s B A, for every form in which a pair is stored."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvarn.adapters.pool import AdapterPool
from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from tests.lora_files import LINEARS, Float32, Pairs, merged, random_pairs, write_gguf_adapter, write_peft
from tests.parity.test_reference_transformers import transformers_output
from tests.running import batch_of, layout_of
from tests.tiny_models import CONFIGS, VOCAB, random_tensors, tiny_model

TOLERANCE = 1e-4  # measured: 2e-5 at most
IDS = [int(i) for i in np.random.default_rng(1).integers(3, VOCAB, 21)]
TABLES = np.arange(6, dtype=np.int32).reshape(3, 2)


def oracle(arch: str, folder: Path, pairs: Pairs, scales: dict[str, float]) -> Float32:
    """Logits of transformers with the adapter merged into the weights."""
    path = folder / "merged" / arch
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[arch]))
    tensors = merged(random_tensors(arch, CONFIGS[arch]), pairs, scales)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return transformers_output(path, IDS)


def logits(base: Path, adapter: Path, backend: NativeBackend | ReferenceBackend) -> tuple[Float32, Float32]:
    """With the adapter, and of the base, from one batch; the adapter's rows stand between others."""
    source = open_weights(base)
    described = describe(source)
    backend.load(described.spec, described.weights)
    source.close()
    layout = layout_of(described.spec)
    backend.reserve_kv(layout, 16 * layout.block_bytes)
    pool = AdapterPool(described.spec, backend, 1 << 30)
    pool.load(adapter, "mine")
    uses = pool.uses("mine")
    assert uses[0].digest == bytes.fromhex(pool.loras[0].digest)
    batch = replace(batch_of([(IDS, 0)] * 3, TABLES), adapters=((), uses, ()))
    found = backend.logits(backend.forward(batch)).reshape(3, len(IDS), -1)
    # Sums of the reference are NumPy's, which on some processors depend on a row's place among others.
    bound = 0.0 if isinstance(backend, NativeBackend) else TOLERANCE
    assert np.abs(found[0] - found[2]).max() <= bound
    return found[1], found[0]


def check(base: Path, adapter: Path, expected: Float32) -> None:
    for backend in (ReferenceBackend(), NativeBackend(2)):
        found, plain = logits(base, adapter, backend)
        assert np.abs(found - expected).max() <= TOLERANCE, backend.name
        assert np.abs(plain - expected).max() > 0.1, "the adapter changes something"


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "phi3", "gemma2", "qwen3"])
def test_a_peft_folder_is_the_merged_weights(arch: str, format: Literal["safetensors", "gguf"], tmp_path: Path) -> None:
    pairs = random_pairs(random_tensors(arch, CONFIGS[arch]))
    expected = oracle(arch, tmp_path, pairs, dict.fromkeys(pairs, 6 / 4))
    check(tiny_model(arch, tmp_path, format), write_peft(tmp_path / "adapter", pairs), expected)


SOME = ("q_proj", "down_proj")
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, int], Any]] = {
    "rslora": ({"use_rslora": True}, {}, lambda _: 6 / math.sqrt(4)),
    "patterns": (
        {"rank_pattern": {"layers.1.self_attn.q_proj": 9}, "alpha_pattern": {"down_proj": 3, "q_proj": 12}},
        {"layers.1.self_attn.q_proj": 9},
        lambda module: (3 if "down" in module else 12) / (9 if "1.self" in module else 4),
    ),
    "patterns and rslora": (
        {"use_rslora": True, "rank_pattern": {"^model\\.layers\\.0\\.mlp\\.down_proj": 2}},
        {"layers.0.mlp.down_proj": 2},
        lambda module: 6 / math.sqrt(2 if "0.mlp" in module else 4),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_scales_and_ranks_are_those_of_the_configuration(variant: str, tmp_path: Path) -> None:
    config, ranks, scale_of = VARIANTS[variant]
    pairs = random_pairs(random_tensors("llama", CONFIGS["llama"]), SOME, ranks=ranks)
    expected = oracle("llama", tmp_path, pairs, {module: scale_of(module) for module in pairs})
    check(tiny_model("llama", tmp_path), write_peft(tmp_path / "adapter", pairs, **config), expected)


@pytest.mark.parametrize("parts", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head", *LINEARS)])
@pytest.mark.parametrize("format", ["safetensors", "gguf"])
def test_embedding_and_head_are_changed_as_other_matrices(
    parts: tuple[str, ...], format: Literal["safetensors", "gguf"], tmp_path: Path
) -> None:
    pairs = random_pairs(random_tensors("llama", CONFIGS["llama"]), parts)
    expected = oracle("llama", tmp_path, pairs, dict.fromkeys(pairs, 6 / 4))
    check(tiny_model("llama", tmp_path, format), write_peft(tmp_path / "adapter", pairs), expected)


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "phi3"])
def test_a_gguf_adapter_is_the_merged_weights(
    arch: str, format: Literal["safetensors", "gguf"], tmp_path: Path
) -> None:
    pairs = random_pairs(random_tensors(arch, CONFIGS[arch]), (*LINEARS, "embed_tokens", "lm_head"))
    expected = oracle(arch, tmp_path, pairs, dict.fromkeys(pairs, 6 / 4))
    adapter = write_gguf_adapter(tmp_path / "adapter.gguf", CONFIGS[arch], arch, pairs)
    check(tiny_model(arch, tmp_path, format), adapter, expected)
