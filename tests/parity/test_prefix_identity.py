"""Blocks on disk are those of one model, computed in one way: whatever differs when a model is loaded is a miss.

Every loading here is what a process does with `prefix_cache_dir`: weights hashed and noted, identity made, folder
opened, prefixes looked for there.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kvarn import LLM, EngineConfig, SamplingParams
from kvarn.backends.native import _native
from kvarn.prefix_store.folder import StoreFolder
from kvarn.prefix_store.identity import NOTE_FILE, WeightFiles, _note_mac
from tests.tiny_models import VOCAB, tiny_model

PROMPT = [3 + 7 * place % (VOCAB - 3) for place in range(40)]
CACHED = 32  # tokens of full blocks
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, ignore_eos=True)
Answer = tuple[tuple[int, ...], Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder whose weights and whose description are files of their own."""
    path = tiny_model("llama", tmp_path)
    words = {f"w{token}": token for token in range(VOCAB)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(path / "tokenizer.json"))
    return path


def asked(model: Path, folder: Path, **options: Any) -> tuple[int, Answer]:
    """What a process finds of the prompt, and its answer. The second question makes it keep the prompt's blocks."""
    config = EngineConfig(prefix_cache_dir=str(folder), threads=1, context=64, kv_bytes=4 << 20, **options)
    with LLM(model, config=config) as llm:
        disk = llm._model.engine.scheduler.prefix_reuse.disk  # type: ignore[union-attr]
        assert disk is not None
        assert disk.flush(30.0)  # the weights are hashed
        first, second = (llm.generate(PROMPT, PARAMS) for _ in range(2))
        assert second.usage.cached_tokens == CACHED
        assert (first.token_ids, first.logprobs) == (second.token_ids, second.logprobs)
    del llm, disk
    gc.collect()  # of a process that has ended nothing is left but files
    return first.usage.cached_tokens, (tuple(first.token_ids), first.logprobs)


def change_weights(model: Path) -> None:
    """Other values in a file of the same name, size and time of writing."""
    path = model / "model.safetensors"
    before = path.stat()
    tensors = load_file(path)
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name][::-1])
    save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def change_config(model: Path, **changes: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


def test_the_same_model_finds_its_blocks_again_also_under_another_path(model: Path, tmp_path: Path) -> None:
    cold = asked(model, tmp_path / "cache")
    assert cold[0] == 0
    assert asked(model, tmp_path / "cache") == (CACHED, cold[1])
    shutil.copytree(model, tmp_path / "copy")
    assert asked(tmp_path / "copy", tmp_path / "cache") == (CACHED, cold[1])


def test_other_weights_at_the_same_path_are_a_miss(model: Path, tmp_path: Path) -> None:
    _, before = asked(model, tmp_path / "cache")
    change_weights(model)
    num_cached, after = asked(model, tmp_path / "cache")
    assert num_cached == 0
    assert after != before
    change_weights(model)  # back to what it was
    assert asked(model, tmp_path / "cache") == (CACHED, before)


@pytest.mark.parametrize(
    "changes",
    [{"rope_theta": 20000.0}, {"rms_norm_eps": 1e-4}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}],
    ids=["rope base", "epsilon", "rope scaling"],
)
def test_another_description_of_the_same_weights_is_a_miss(model: Path, tmp_path: Path, changes: Any) -> None:
    _, before = asked(model, tmp_path / "cache")
    told = (model / "config.json").read_text()
    change_config(model, **changes)
    num_cached, after = asked(model, tmp_path / "cache")
    assert num_cached == 0
    assert after != before
    (model / "config.json").write_text(told)
    assert asked(model, tmp_path / "cache") == (CACHED, before)


@pytest.mark.parametrize(
    "options",
    [{"kv_dtype": "q8_0"}, {"kv_dtype": "f32"}, {"encoder_weights": "file"}, {"backend": "reference"}],
    ids=lambda one: " ".join(one.values()),
)
def test_blocks_computed_in_another_way_are_a_miss(model: Path, tmp_path: Path, options: Any) -> None:
    _, before = asked(model, tmp_path / "cache")
    assert asked(model, tmp_path / "cache", **options)[0] == 0
    assert asked(model, tmp_path / "cache", **options)[0] == CACHED
    assert asked(model, tmp_path / "cache") == (CACHED, before)


def test_blocks_of_another_size_are_a_miss(model: Path, tmp_path: Path) -> None:
    assert asked(model, tmp_path / "cache", backend="reference")[0] == 0
    assert asked(model, tmp_path / "cache", backend="reference", block_size=32)[0] == 0
    assert asked(model, tmp_path / "cache", backend="reference")[0] == CACHED


def test_blocks_of_another_kernel_table_are_a_miss(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = _native.isa_names()
    for num_cached in (0, CACHED):
        for isa in names:
            monkeypatch.setenv("KVARN_ISA", isa)
            assert asked(model, tmp_path / "cache")[0] == num_cached
    assert len(names) > 1  # scalar, and at least one that is faster


@pytest.mark.parametrize("hand", ["a stranger's", "the owner's"])
def test_a_forged_note_of_the_weights_hash_is_a_miss(model: Path, tmp_path: Path, hand: str) -> None:
    """The note says that the changed file is the old one. Whoever has not the folder's key cannot make it believed."""
    cache = tmp_path / "cache"
    asked(model, cache)
    change_weights(model)
    note = json.loads((cache / NOTE_FILE).read_text())
    ((_, digest),) = note["hashes"].items()
    forged = {WeightFiles.of(model).stamps[0]: digest}
    if hand == "the owner's":  # who is believed: the note is what is read
        opened = StoreFolder(cache, 1 << 30)
        note["mac"] = _note_mac(opened, forged)
        opened.close()
    (cache / NOTE_FILE).write_text(json.dumps(note | {"hashes": forged}))
    assert asked(model, cache)[0] == (0 if hand == "a stranger's" else CACHED)
