"""The reference backend against transformers, on a tiny random model of every architecture, in both formats."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from tests.running import all_logits, batch_of, hidden_states, layout_of, scattered_table
from tests.tiny_models import ARCHITECTURES, DECODERS, ORIGINAL_CONTEXT, VOCAB, WINDOW, tiny_model

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

Float32 = npt.NDArray[np.float32]
Format = Literal["safetensors", "gguf"]
Oracle = Callable[[str], Float32]

TOLERANCE = 1e-4  # measured: 2e-5 at most
IDS = [int(i) for i in np.random.default_rng(1).integers(3, VOCAB, 29)]
CHUNKS = (5, 7, 1, 16)
BLOCK_SIZE = 4

assert len(IDS) > 3 * WINDOW
assert len(IDS) > ORIGINAL_CONTEXT  # the LongRoPE model is past its first context


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    @cache
    def run(arch: str) -> Float32:
        return transformers_output(tiny_model(arch, tmp_path_factory.mktemp("oracle")), IDS)

    return run


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize("arch", DECODERS)
def test_logits_agree_whole_and_in_chunks(arch: str, format: Format, oracle: Oracle, tmp_path: Path) -> None:
    expected = oracle(arch)
    assert np.std(expected) > 0.1  # the random model says something
    backend, table = reference_of(tiny_model(arch, tmp_path, format), context=len(IDS))
    for chunks in ((len(IDS),), CHUNKS):
        assert np.abs(all_logits(backend, table, IDS, chunks) - expected).max() <= TOLERANCE


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
def test_encoder_states_agree(format: Format, oracle: Oracle, tmp_path: Path) -> None:
    backend, table = reference_of(tiny_model("bert", tmp_path, format))
    (hidden,) = hidden_states(backend, table, IDS, (len(IDS),))
    assert np.abs(hidden - oracle("bert")).max() <= TOLERANCE  # type: ignore[operator]


def test_encoder_runs_without_a_cache(oracle: Oracle, tmp_path: Path) -> None:
    backend, _ = reference_of(tiny_model("bert", tmp_path))
    hidden = backend.forward(batch_of([(IDS, 0), (IDS[:7], 0)], np.empty((2, 0), np.int32)))
    assert np.abs(hidden[: len(IDS)] - oracle("bert")).max() <= TOLERANCE


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
def test_a_short_context_chooses_the_short_rope_factors(format: Format, tmp_path: Path) -> None:
    ids = IDS[: ORIGINAL_CONTEXT - 1]
    expected = transformers_output(tiny_model("phi3-longrope", tmp_path), ids)
    backend, table = reference_of(tiny_model("phi3-longrope", tmp_path, format), context=ORIGINAL_CONTEXT)
    assert np.abs(all_logits(backend, table, ids, (len(ids),)) - expected).max() <= TOLERANCE


def test_neighbours_in_a_ragged_batch_change_nothing(oracle: Oracle, tmp_path: Path) -> None:
    backend, table = reference_of(tiny_model("mistral", tmp_path))
    tables = np.concatenate([table, scattered_table(64, 64)[:, 10 : 10 + table.shape[1]]])
    assert not set(tables[0]) & set(tables[1])
    backend.forward(batch_of([(IDS[:11], 0), (IDS[5:8], 0)], tables))
    hidden = backend.forward(batch_of([(IDS[11:], 11), (IDS[8:20], 3)], tables))
    logits = backend.logits(hidden)[: len(IDS) - 11]
    assert np.abs(logits - oracle("mistral")[11:]).max() <= TOLERANCE


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_folder_saved_by_transformers_describes_the_same_model(arch: str, tmp_path: Path) -> None:
    folder = tiny_model(arch, tmp_path)
    ours = describe(open_weights(folder))
    model, _ = _load(folder)
    model.save_pretrained(tmp_path / "saved")
    saved = describe(open_weights(tmp_path / "saved"))
    assert saved.spec.blocks == ours.spec.blocks
    assert saved.spec.embedding == ours.spec.embedding
    assert saved.spec.head == ours.spec.head
    for name in ours.weights.tensors:
        np.testing.assert_array_equal(saved.weights.array(name), ours.weights.array(name))


def reference_of(path: Path, context: int | None = None) -> tuple[ReferenceBackend, npt.NDArray[np.int32]]:
    source = open_weights(path)
    described = describe(source, context)
    backend = ReferenceBackend()
    backend.load(described.spec, described.weights)
    source.close()
    layout = layout_of(described.spec, block_size=BLOCK_SIZE)
    num_blocks = backend.reserve_kv(layout, 64 * layout.block_bytes)
    return backend, scattered_table(num_blocks, -(-len(IDS) // BLOCK_SIZE))


def transformers_output(folder: Path, ids: list[int]) -> Float32:
    """Logits, or the last hidden states of an encoder. Every weight of the folder must be known to transformers."""
    model, report = _load(folder)
    missing = {name for name in report["missing_keys"] if "pooler" not in name}
    assert not missing, missing
    assert not report["unexpected_keys"]
    with torch.no_grad():
        output = model.eval()(torch.tensor([ids]))
    result: Float32 = (output.last_hidden_state if folder.name == "bert" else output.logits)[0].numpy()
    return result


def _load(folder: Path) -> tuple[Any, dict[str, Any]]:
    is_encoder = folder.name == "bert"
    kind: Any = transformers.AutoModel if is_encoder else transformers.AutoModelForCausalLM
    return kind.from_pretrained(  # type: ignore[no-any-return]
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
