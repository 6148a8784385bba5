"""Opening a file of n bytes allocates at most 2n + 64 MiB, whatever the file claims."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from kvarn.errors import ModelError
from kvarn.formats.gguf import limits
from kvarn.formats.gguf.reader import GGUFFile
from tests import gguf_maker as maker
from tests.gguf_maker import ARRAY, STRING, UINT16, UINT64, array_entry, entry, gguf, string

SLACK = 64 << 20


def most_tensors() -> bytes:
    names = [f"{i:064d}" for i in range(limits.MAX_TENSORS)]
    infos = [string(name) + struct.pack("<I4QIQ", 4, 1, 1, 1, 8, 0, 32 * i) for i, name in enumerate(names)]
    head = gguf(num_tensors=len(infos)) + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(32 * len(infos))


def most_short_lists() -> bytes:
    values = list(range(1000, 1000 + limits.MAX_LIST))
    return gguf([array_entry(f"key.{i}", UINT16, values) for i in range(limits.MAX_ENTRIES)])


def widest_text() -> bytes:
    return gguf([entry(f"{i}", STRING, "😀" + "a" * (1 << 20)) for i in range(7)])


def empty_strings() -> bytes:
    count = limits.MAX_STRINGS // 4  # empty ones need the most beside their own bytes; all of them take long to trace
    return gguf([string("tokens") + struct.pack("<IIQ", ARRAY, STRING, count) + bytes(8 * count)])


def long_numbers() -> bytes:
    count = 4 << 20
    return gguf([string("numbers") + struct.pack("<IIQ", ARRAY, UINT64, count) + bytes(8 * count)])


@pytest.mark.parametrize("make", [most_tensors, most_short_lists, widest_text, empty_strings, long_numbers])
def test_the_largest_allowed_files_stay_within_the_bound(tmp_path: Path, make: Callable[[], bytes]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(make())
    assert _peak_of_opening(path, may_fail=False) <= 2 * path.stat().st_size + SLACK


def test_no_broken_file_allocates_more_than_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for case, (data, _) in maker.broken().items():
        path.write_bytes(data)
        assert _peak_of_opening(path, may_fail=True) <= 1 << 20, case


@pytest.mark.parametrize(
    "data",
    [
        gguf([entry(f"{i}", STRING, "a" * (1 << 20)) for i in range(9)]),
        gguf([array_entry("a", STRING, data=bytes(8 * limits.MAX_STRINGS + 8), count=limits.MAX_STRINGS + 1)]),
        gguf(num_entries=limits.MAX_ENTRIES + 1) + bytes(1 << 20),
        gguf(num_tensors=limits.MAX_TENSORS + 1) + bytes(4 << 20),
        gguf([entry("k" * 65_000 + f"{i}", maker.BOOL, True) for i in range(150)]),
    ],
    ids=["text", "strings", "entries", "tensors", "keys"],
)
def test_one_more_than_a_limit_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"allowed|more than"):
        GGUFFile(path)


def _peak_of_opening(path: Path, *, may_fail: bool) -> int:
    tracemalloc.start()
    try:
        GGUFFile(path)
    except ModelError:
        if not may_fail:
            raise
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak
