"""Models in several files: opened through the first, refused when the parts do not fit together."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from kvarn.errors import FormatError, ModelError, ModelNotFound
from kvarn.formats.gguf.splits import SplitGGUF
from kvarn.formats.gguf.writer import write_gguf
from kvarn.formats.open import open_weights

TENSORS = {f"blk.{i}.weight": np.full((2, 32), i, dtype=np.float32) for i in range(5)}


def split(folder: Path) -> list[Path]:
    return write_gguf(folder / "tiny.gguf", {"general.name": "tiny"}, TENSORS, split_max_tensors=2)


def test_all_parts_open_through_the_first(tmp_path: Path) -> None:
    paths = split(tmp_path)
    assert [path.name for path in paths] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    source = open_weights(paths[0])
    assert isinstance(source, SplitGGUF)
    assert source.paths == tuple(map(str, paths))
    assert source.num_bytes == sum(path.stat().st_size for path in paths)
    assert source.metadata["general.name"] == "tiny"
    assert list(source.tensors) == list(TENSORS)
    for name, values in TENSORS.items():
        np.testing.assert_array_equal(source.array(name), values)
    raw = source.raw("blk.4.weight")
    source.release_pages(TENSORS)
    source.verify_unchanged()
    source.close()
    assert raw.view(np.float32)[0] == 4


def test_parts_written_by_the_gguf_package_are_opened(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama", split_max_tensors=2)
    for name, values in TENSORS.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_weights(tmp_path / "tiny-00001-of-00003.gguf")
    for name, values in TENSORS.items():
        np.testing.assert_array_equal(source.array(name), values)


def test_a_later_part_names_the_first(tmp_path: Path) -> None:
    paths = split(tmp_path)
    with pytest.raises(FormatError, match=r"part 2 of 3; open the first part, .*tiny-00001-of-00003.gguf"):
        open_weights(paths[1])


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[2].unlink()
    with pytest.raises(ModelNotFound, match=r"tiny-00003-of-00003.gguf: part 3 of 3 is missing"):
        open_weights(paths[0])


def test_a_truncated_part_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[1].write_bytes(paths[1].read_bytes()[:-64])
    with pytest.raises(FormatError, match=r"tiny-00002-of-00003.gguf .*truncated"):
        open_weights(paths[0])


def test_a_renamed_first_part_is_refused(tmp_path: Path) -> None:
    first = split(tmp_path)[0]
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(FormatError, match=r"its name must be model-00001-of-00003.gguf"):
        open_weights(renamed)


def test_a_name_without_split_metadata_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny-00001-of-00002.gguf"
    write_gguf(path, {}, {})
    with pytest.raises(FormatError, match=r"has no split\.count"):
        open_weights(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"split.count": 2}, "its name must be tiny-00001-of-00002.gguf"),
        ({"split.count": 65_535}, "split.count is 65535"),
        ({"split.count": "3"}, "split.count is '3'"),
        ({"split.count": -3}, "split.count is -3"),
        ({"split.no": 1}, "its name must be tiny-00002-of-00003.gguf"),
        ({"split.no": None}, "split.no is None"),
        ({"split.tensors.count": 6}, "split.tensors.count is 6, all 3 parts together hold 5 tensors"),
        ({"split.tensors.count": 2**40}, "split.tensors.count"),
    ],
)
def test_a_first_part_with_wrong_numbers_is_refused(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    paths = split(tmp_path)
    metadata = {"split.no": 0, "split.count": 3, "split.tensors.count": 5} | changes
    first_two = {name: TENSORS[name] for name in list(TENSORS)[:2]}
    write_gguf(paths[0], {key: value for key, value in metadata.items() if value is not None}, first_two)
    with pytest.raises(ModelError, match=reason):
        open_weights(paths[0])


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"split.no": 2, "split.count": 3}, "expected part 2 of 3, the file says part 3 of 3"),
        ({"split.no": 1, "split.count": 4}, "expected part 2 of 3, the file says part 2 of 4"),
        ({}, "split.count is None"),
    ],
)
def test_a_later_part_with_wrong_numbers_is_refused(tmp_path: Path, metadata: dict[str, object], reason: str) -> None:
    paths = split(tmp_path)
    write_gguf(paths[1], metadata, {name: TENSORS[name] for name in list(TENSORS)[2:4]})
    with pytest.raises(FormatError, match=reason):
        open_weights(paths[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    write_gguf(paths[1], {"split.no": 1, "split.count": 3}, {name: TENSORS[name] for name in list(TENSORS)[1:3]})
    with pytest.raises(FormatError, match=r"'blk.1.weight' is also in"):
        open_weights(paths[0])


def test_a_model_in_one_part_is_opened(tmp_path: Path) -> None:
    (path,) = write_gguf(tmp_path / "tiny.gguf", {}, TENSORS, split_max_tensors=9)
    assert path.name == "tiny-00001-of-00001.gguf"
    assert list(open_weights(path).tensors) == list(TENSORS)
