"""Files that are no files, and JSON that is no configuration: plain refusals, whichever file of a folder it is."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from kvarn.errors import FormatError, ModelError
from kvarn.formats.open import open_weights
from kvarn.formats.strict_json import MAX_DEPTH, JsonLimits, parse_object, read_optional
from kvarn.models.describe import describe
from kvarn.tokenizer import load_tokenizer
from tests.tiny_models import tiny_model
from tests.unit.tokenizer.test_from_folder import byte_level, saved

FILES = (
    "config.json",
    "model.safetensors",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
JSON_FILES = tuple(name for name in FILES if name.endswith(".json"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tiny_model("bert", tmp_path)
    return saved(byte_level(), folder)


def load(folder: Path) -> None:
    source = open_weights(folder)
    try:
        describe(source)
        load_tokenizer(source)
    finally:
        source.close()


def place(folder: Path, name: str) -> Path:
    path = folder / name
    path.unlink(missing_ok=True)
    return path


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("target", ["/dev/zero", "/dev/full", "fifo", "folder", "nothing"])
def test_a_file_that_is_linked_to_something_else_is_refused(name: str, target: str, model: Path) -> None:
    path = place(model, name)
    if target == "fifo":
        os.mkfifo(path)
    elif target == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load(model)


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 100_000])
def test_deep_nesting_is_refused(name: str, depth: int, model: Path) -> None:
    place(model, name).write_text('{"rope_scaling": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(FormatError, match=r"nested too deeply|more than"):
        load(model)


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 5000, "1e400", "NaN"])
def test_numbers_that_are_none_are_refused(name: str, number: str, model: Path) -> None:
    place(model, name).write_text(f'{{"hidden_size": {number}}}')
    with pytest.raises(FormatError, match=r"too large|not a JSON number"):
        load(model)


@pytest.mark.parametrize("name", FILES)
def test_a_pointer_of_git_lfs_is_called_by_its_name(name: str, model: Path) -> None:
    place(model, name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    with pytest.raises(FormatError, match=rf"{name}: this is a Git LFS pointer .* run git lfs pull"):
        load(model)


def test_the_pooling_file_is_read_as_strictly(model: Path) -> None:
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").symlink_to("/dev/zero")
    with pytest.raises(FormatError, match="this is a device"):
        load(model)


def test_a_file_that_may_be_missing_is_empty_then(tmp_path: Path) -> None:
    assert read_optional(tmp_path / "none.json") == {}
    (tmp_path / "some.json").write_text("[]")
    with pytest.raises(FormatError, match="not an object"):
        read_optional(tmp_path / "some.json")


def test_more_values_than_allowed_are_not_parsed() -> None:
    data = json.dumps({"a": [0] * 1000}).encode()
    assert parse_object(data, "a.json")["a"][:2] == [0, 0]
    with pytest.raises(FormatError, match="more than 500 values"):
        parse_object(data, "a.json", JsonLimits(num_values=500))


def test_a_file_of_llama2c_is_called_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "stories15M.bin"
    path.write_bytes(struct.pack("<7i", 288, 768, 6, 6, 6, 32000, 256) + bytes(4096))
    with pytest.raises(FormatError, match=r"a file of llama2\.c"):
        open_weights(path)
    path.write_bytes(b"PK\x03\x04" + bytes(64))
    with pytest.raises(FormatError, match="pickle files are not read"):
        open_weights(path)


def test_a_gguf_by_another_name_is_opened(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path, "gguf")
    path = path.rename(tmp_path / "model.bin")
    assert describe(open_weights(path)).spec.blocks
