"""Whole models in ggml's types without kernels: the native core and torch give the logits of the exact values."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.formats.open import open_weights
from kvarn.formats.stored_types.table import StoredType
from kvarn.models.describe import describe
from tests.parity.test_quantized_folders import logits_of
from tests.torch_backend import torch_cpu
from tests.unit.formats.test_stored_types import BY_NAME, random_blocks

WIDTH, HEADS, VOCAB = 256, 4, 160
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
FACTS = {"block_count": 2, "context_length": 64, "embedding_length": WIDTH, "feed_forward_length": WIDTH}


def model(kind: StoredType, folder: Path) -> Path:
    """A llama of two layers whose matrices have random codes; the norms make up for the size of their values."""
    rng = np.random.default_rng(kind.id)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    for key, value in FACTS.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    spread = np.std(kind.decoded(random_blocks(kind).reshape(-1)))
    norm = np.full(WIDTH, 1 / (spread * np.sqrt(WIDTH)), np.float32)
    for layer in range(FACTS["block_count"]):
        for name in MATRICES:
            blocks = random_blocks(kind, WIDTH * WIDTH // kind.block_values).reshape(WIDTH, -1)
            blocks = rng.permutation(blocks)
            writer.add_tensor(f"blk.{layer}.{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind.name])
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", norm)
    for name, rows in (("token_embd", VOCAB), ("output", VOCAB)):
        writer.add_tensor(f"{name}.weight", rng.standard_normal((rows, WIDTH)).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


@pytest.mark.parametrize("name", BY_NAME)
def test_a_model_gives_the_logits_of_its_exact_values(name: str, tmp_path: Path) -> None:
    path = model(BY_NAME[name], tmp_path)
    description = describe(open_weights(path))
    assert any(note.startswith(f"{name} weights are run as") for note in description.notes)
    expected = logits_of(ReferenceBackend(), path)
    assert np.isfinite(expected).all()
    # The native core rounds activations to 8 bits; torch nothing: what is left is the loss of the conversion.
    for backend, limit in ((NativeBackend(1), 0.04), (torch_cpu(), 0.02)):
        away = np.linalg.norm(logits_of(backend, path) - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert np.median(away) < limit
