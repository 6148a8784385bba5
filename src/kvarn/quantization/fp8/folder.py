"""A Hugging Face folder with FP8 matrices, made of a folder with floats. Streamed; appears when it is whole.

Matrices of attention, feed-forward and experts become FP8. Embeddings, the output matrix, routers and norms stay.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvarn.errors import ConfigError, FormatError, UnsupportedModel
from kvarn.formats.gguf.new_file import NewFile, umask
from kvarn.formats.open import open_weights
from kvarn.formats.quants import dequantize
from kvarn.formats.safetensors import SafetensorsFolder
from kvarn.formats.weights import TensorInfo
from kvarn.models.describe import describe
from kvarn.quantization.blocks import FLOATS, Bytes, Float32
from kvarn.quantization.disk import require_room
from kvarn.quantization.fp8.scheme import TILE, FP8Scheme, encode, scales_of
from kvarn.quantization.report import FP8Change

MAX_COPIED_BYTES = 256 << 20
SLICE_VALUES = 1 << 21  # of one step: its temporaries take some 50 MB
MATRIX = re.compile(
    r"\.layers\.\d+\.(self_attn|mlp|block_sparse_moe)\.((shared_experts?|experts\.\d+)\.)?(\w+_proj|w[123])\.weight$"
)
COPIED = re.compile(
    r"(tokenizer|special_tokens|generation_config|chat_template|added_tokens|vocab|merges)[\w.]*\.(json|jinja|txt|model)$"
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the new file."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    pieces: Callable[[], Iterator[Bytes]]


def write_fp8_folder(
    source: Path, target: Path, scheme: FP8Scheme, progress: Callable[[int, int], None] | None
) -> tuple[FP8Change, ...]:
    """Write the folder and say what became of each tensor."""
    opened = open_weights(source)
    with closing(opened):
        if not isinstance(opened, SafetensorsFolder):
            raise ConfigError(
                f"{source} is a GGUF file, FP8 is made of a Hugging Face folder; give the folder, or for GGUF Q8_0, "
                "which is of the same size and more exact"
            )
        _refuse_quantized(opened)
        describe(opened)  # refuses what the loader refuses
        changes = _changes(opened, scheme)
        entries = dict(_entries(opened, changes))
        require_room(target, sum(entry.num_bytes for entry in entries.values()))
        with closing(NewFile(target.parent)) as new:
            _write_tensors(new, entries, progress)
            opened.verify_unchanged()
            _publish(new, source, target, _config(opened, changes, scheme))
    return changes


def _changes(opened: SafetensorsFolder, scheme: FP8Scheme) -> tuple[FP8Change, ...]:
    found = []
    for name, info in opened.tensors.items():
        is_matrix = len(info.shape) == 2 and MATRIX.search(f".{name}") is not None
        fits = is_matrix and scheme.fits(*info.shape)
        found.append(FP8Change(info, scheme if is_matrix else info.type, scheme if fits else info.type))
    if not any(change.type is scheme for change in found):
        sides = (
            f" with sides that are multiples of {TILE}; FP8_ROW fits any" if any(c.is_fallback for c in found) else ""
        )
        raise UnsupportedModel(f"{opened.path} has no matrix of attention or feed-forward{sides}")
    return tuple(found)


def _refuse_quantized(opened: SafetensorsFolder) -> None:
    lossy = [info for info in opened.tensors.values() if info.type not in FLOATS]
    if lossy or opened.conversions or opened.metadata["hf"].get("quantization_config") is not None:
        raise ConfigError(f"{opened.path} is quantised already; FP8 is made of F32, F16 or BF16, give the original")


def _entries(opened: SafetensorsFolder, changes: tuple[FP8Change, ...]) -> Iterator[tuple[str, _Entry]]:
    for change in changes:
        info, scheme = change.source, change.type
        if not isinstance(scheme, FP8Scheme):
            yield info.name, _Entry(info.type.name, info.shape, info.num_bytes, _copied(opened, info))
            continue
        matrix = _Matrix(opened, info, scheme)
        shape = scheme.scales_shape(*info.shape)
        yield info.name, _Entry("F8_E4M3", info.shape, info.num_values, matrix.codes)
        yield f"{info.name}{scheme.suffix}", _Entry("F32", shape, 4 * int(np.prod(shape)), matrix.scales)


def _copied(opened: SafetensorsFolder, info: TensorInfo) -> Callable[[], Iterator[Bytes]]:
    def make() -> Iterator[Bytes]:
        yield opened.raw(info.name)
        opened.release_pages((info.name,))

    return make


@dataclass(slots=True)
class _Matrix:
    """One matrix on its way to FP8; the scales are known once the codes are written."""

    opened: SafetensorsFolder
    info: TensorInfo
    scheme: FP8Scheme
    found: Float32 | None = None

    def codes(self) -> Iterator[Bytes]:
        scheme = self.scheme
        peaks = [scheme.peaks(values) for values in self._slices()]
        every = np.concatenate(peaks)
        self.found = scales_of(every.max(keepdims=True) if scheme is FP8Scheme.FP8_TENSOR else every)
        begin = 0
        for part, values in zip(peaks, self._slices(), strict=True):
            own = self.found if scheme is FP8Scheme.FP8_TENSOR else self.found[begin : begin + len(part)]
            yield encode(values / scheme.spread(own))
            begin += len(part)
        self.opened.release_pages((self.info.name,))

    def scales(self) -> Iterator[Bytes]:
        assert self.found is not None
        yield np.ascontiguousarray(self.found, "<f4").reshape(-1).view(np.uint8)

    def _slices(self) -> Iterator[Float32]:
        """Whole rows of tiles at a time."""
        rows, columns = self.info.shape
        step = max(1, SLICE_VALUES // columns // TILE) * TILE
        stored = self.opened.raw(self.info.name).reshape(rows, -1)
        for begin in range(0, rows, step):
            some = stored[begin : begin + step]
            values = dequantize(some.reshape(-1), self.info.type, (len(some), columns))
            if not np.isfinite(values).all():
                raise FormatError(f"tensor {self.info.name} has NaN or infinite values; it cannot be FP8")
            yield values


def _write_tensors(new: NewFile, entries: Mapping[str, _Entry], progress: Callable[[int, int], None] | None) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.num_bytes
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    new.file.write(len(text).to_bytes(8, "little") + text)
    done = 0
    for entry in entries.values():
        for piece in entry.pieces():
            new.file.write(np.ascontiguousarray(piece).data)
            done += piece.nbytes
            if progress is not None:
                progress(done, end)
    assert done == end, "the pieces of the tensors are not their bytes"


def _config(opened: SafetensorsFolder, changes: tuple[FP8Change, ...], scheme: FP8Scheme) -> dict[str, object]:
    """config.json with the entry that names the scheme and the modules it leaves alone."""
    kept = [
        change.source.name.removesuffix(".weight")
        for change in changes
        if change.type is not scheme and len(change.source.shape) == 2 and change.source.name.endswith(".weight")
    ]
    ignored = list(dict.fromkeys(["lm_head", *(name for name in kept if "embed" not in name)]))
    return {**opened.metadata["hf"], "quantization_config": scheme.config(ignored)}


def _publish(new: NewFile, source: Path, target: Path, config: Mapping[str, object]) -> None:
    draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=".kvarn-"))
    try:
        draft.chmod(0o777 & ~umask())
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in sorted(source.iterdir()):
            if COPIED.fullmatch(file.name) and file.is_file():
                _copy(file, draft / file.name)
        new.publish(draft / "model.safetensors")
        os.rename(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _copy(file: Path, target: Path) -> None:
    size = file.stat().st_size
    if size > MAX_COPIED_BYTES:
        raise FormatError(
            f"the file has {size:,} bytes, {MAX_COPIED_BYTES:,} are allowed beside the weights", file=str(file)
        )
    shutil.copyfile(file, target)
