"""Blocks of the native KV cache that have their memory before they are written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvarn.backends.batch import KVLayout
from kvarn.backends.native.backend import NativeBackend
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from tests.running import layout_of
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system has no such call")
NUM_BLOCKS = 4096


@pytest.fixture
def cache(tmp_path: Path) -> tuple[NativeBackend, KVLayout]:
    source = open_weights(tiny_model("llama", tmp_path))
    described = describe(source)
    backend = NativeBackend(1)
    backend.load(described.spec, described.weights)
    source.close()
    layout = layout_of(described.spec)
    assert backend.reserve_kv(layout, NUM_BLOCKS * layout.block_bytes) == NUM_BLOCKS
    return backend, layout


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_blocks_have_memory_before_they_are_written(cache: tuple[NativeBackend, KVLayout]) -> None:
    backend, layout = cache
    before = resident_bytes()
    backend.populate_blocks(NUM_BLOCKS // 2)
    grown = resident_bytes() - before
    assert 0.9 * layout.block_bytes * NUM_BLOCKS / 2 < grown < 0.75 * layout.block_bytes * NUM_BLOCKS


def test_what_is_in_a_block_stays(cache: tuple[NativeBackend, KVLayout]) -> None:
    backend, _ = cache
    content = backend.read_block(0)
    content[:] = 7
    backend.write_block(3, content)
    backend.populate_blocks(NUM_BLOCKS)
    backend.populate_blocks(0)
    assert (backend.read_block(3) == 7).all()
    assert not backend.read_block(NUM_BLOCKS - 1).any()


def test_no_more_blocks_are_populated_than_there_are(cache: tuple[NativeBackend, KVLayout]) -> None:
    backend, layout = cache
    backend.populate_blocks(NUM_BLOCKS)
    before = resident_bytes()
    backend.populate_blocks(100 * NUM_BLOCKS)
    assert resident_bytes() - before < layout.block_bytes * NUM_BLOCKS / 2
