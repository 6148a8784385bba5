"""Outputs of quantize, imatrix and prune: nothing that is read, no device and no file of others is ever replaced."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvarn
from kvarn.errors import ConfigError
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.writer import Stored, write_gguf
from tests.float_model import write_float_model, write_text

FEW = {"chunks": 4, "context": 32}
Run = Callable[[Path, Path], object]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_float_model(tmp_path / "source.gguf", width=64, hidden=96)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


@pytest.fixture(params=["quantize", "imatrix", "prune"])
def run(request: pytest.FixtureRequest, text: Path) -> Run:
    """A command that may replace files, from a source to an output."""

    def quantized(source: Path, output: Path) -> object:
        options = kvarn.QuantizeOptions(method="gptq", text=text, force=True)
        return kvarn.quantize(source, "Q4_0", output, options=options)

    def collected(source: Path, output: Path) -> object:
        return kvarn.collect_imatrix(source, output, text=text, options=kvarn.ImatrixOptions(**FEW, force=True))

    def pruned(source: Path, output: Path) -> object:
        options = kvarn.PruneOptions(text=text, force=True)
        return kvarn.prune(source, kvarn.PruneTarget(layers=1), output, options=options)

    commands: dict[str, Run] = {"quantize": quantized, "imatrix": collected, "prune": pruned}
    return commands[request.param]


def test_what_is_read_is_never_replaced(run: Run, source: Path, text: Path, tmp_path: Path) -> None:
    linked = tmp_path / "link.gguf"
    linked.symlink_to(source)
    before = {path: path.read_bytes() for path in (source, text, linked)}
    for output, message in ((source, "the source itself"), (linked, "the source itself"), (text, "is read by")):
        with pytest.raises(ConfigError, match=message):
            run(source, output)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder here in which even root can make no file")
def test_a_folder_in_which_no_file_can_be_made_is_refused_before_the_work(
    run: Run, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    with pytest.raises(ConfigError, match="no file can be made in the output's folder '/proc'"):
        run(source, Path("/proc/output.gguf"))


def test_a_pipe_or_a_device_is_never_replaced(run: Run, source: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="a device or a pipe"):
        run(source, pipe)
    assert pipe.is_fifo()


def test_other_parts_of_a_split_source_are_never_replaced(run: Run, source: Path, tmp_path: Path) -> None:
    file = GGUFFile(source)
    tensors = {name: Stored(info.type, info.shape, file.raw(name)) for name, info in file.tensors.items()}
    parts = write_gguf(tmp_path / "split.gguf", file.stored_metadata(), tensors, split_max_tensors=40)
    assert len(parts) == 2
    with pytest.raises(ConfigError, match="the source itself"):
        run(parts[0], parts[1])


def test_an_imatrix_that_exists_is_replaced_by_force_alone(source: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "mine"
    output.write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        kvarn.collect_imatrix(source, output, text=text, options=kvarn.ImatrixOptions(**FEW))
    assert output.read_text() == "mine"
    kvarn.collect_imatrix(source, output, text=text, options=kvarn.ImatrixOptions(**FEW, force=True))
    assert output.read_bytes()[:4] == b"GGUF"


def test_an_imatrix_that_is_used_is_not_the_output(source: Path, text: Path, tmp_path: Path) -> None:
    matrix = tmp_path / "imatrix"
    kvarn.collect_imatrix(source, matrix, text=text, options=kvarn.ImatrixOptions(**FEW))
    before = matrix.read_bytes()
    with pytest.raises(ConfigError, match="is read by"):
        kvarn.quantize(source, "Q4_0", matrix, options=kvarn.QuantizeOptions(imatrix=matrix, force=True))
    again = kvarn.ImatrixOptions(**FEW, merge=[matrix], force=True)
    with pytest.raises(ConfigError, match="is read by"):
        kvarn.collect_imatrix(source, matrix, text=text, options=again)
    assert matrix.read_bytes() == before


def test_a_name_as_long_as_names_can_be_is_given(source: Path, tmp_path: Path) -> None:
    output = tmp_path / ("o" * 250 + ".gguf")
    kvarn.quantize(source, "Q4_0", output)
    assert {path.name for path in tmp_path.iterdir()} == {output.name, source.name}


def test_nothing_is_written_outside_of_the_outputs_folder(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))  # what kill -9 would leave there, nobody finds
    size = kvarn.SizeTarget(bits_per_weight=6.0)
    kvarn.quantize(source, size, tmp_path / "size.gguf", options=kvarn.QuantizeOptions(text=text))
    for then in ("Q8_0", size):
        output = tmp_path / f"{then}.gguf"
        kvarn.prune(source, kvarn.PruneTarget(layers=1), output, options=kvarn.PruneOptions(text=text, then=then))
        assert GGUFFile(output).metadata["quantize.imatrix.file"] == "pruned.imatrix"


def test_an_imatrix_in_memory_is_as_good_as_its_file(source: Path, text: Path, tmp_path: Path) -> None:
    options = kvarn.ImatrixOptions(chunks=4, context=32)
    matrix = kvarn.collect_imatrix(source, tmp_path / "imatrix", text=text, options=options)
    for name, given in (("file", tmp_path / "imatrix"), ("memory", matrix)):
        kvarn.quantize(source, "Q4_0", tmp_path / name, options=kvarn.QuantizeOptions(imatrix=given))
    read, held = (GGUFFile(tmp_path / name) for name in ("file", "memory"))
    assert all((read.raw(name) == held.raw(name)).all() for name in read.tensors)
