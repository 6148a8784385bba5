"""Running text for calibration and evaluation: read, hashed, encoded and cut into chunks of equal length."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvarn.checks import check_parameter, is_iterable, why_unreadable
from kvarn.errors import InvalidParameter

if TYPE_CHECKING:
    from kvarn.tokenizer.tokenizer import Tokenizer

Int32 = npt.NDArray[np.int32]
TextFiles = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

DIGESTS = "kvarn.calibration.sha256"  # metadata of a file: of the texts it was calibrated, measured or pruned with
MAX_TEXT_BYTES = 256 << 20
MAX_UNKNOWN_SHARE = 0.02  # of tokens; beyond, the model cannot read this text


@dataclass(frozen=True, slots=True)
class RunningText:
    """Files as one text. digests: sha256 of each file, to tell calibration from evaluation text."""

    names: tuple[str, ...]
    digests: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Chunks:
    """Token ids, (chunks, context); num_available: as many as the whole text would give."""

    ids: Int32
    num_available: int


def read_text(files: TextFiles) -> RunningText:
    """Read UTF-8 files, one after another."""
    paths = text_paths(files)
    if not paths:
        raise InvalidParameter("no text was given; name at least one file", field="text")
    contents = [_read(path) for path in paths]
    digests = tuple(hashlib.sha256(content).hexdigest() for content in contents)
    texts = [_decoded(path, content) for path, content in zip(paths, contents, strict=True)]
    return RunningText(tuple(path.name for path in paths), digests, "\n".join(texts))


def text_paths(files: TextFiles) -> list[Path]:
    """The files one by one; what is no path is refused."""
    given = [files] if isinstance(files, str | os.PathLike) or not is_iterable(files) else files
    return [Path(check_parameter.path("text", one, "the path of a file, or a list of them")) for one in given]


def cut_chunks(text: RunningText, tokenizer: Tokenizer, context: int, max_chunks: int | None) -> Chunks:
    """Cut a text into chunks of context tokens; each begins with the bos token where the model wants one."""
    ids = tokenizer.encode(text.text, add_special=False)
    num_available = len(ids) // context
    if num_available == 0:
        raise InvalidParameter(
            f"{', '.join(text.names)} has {len(ids):,} tokens, one chunk needs {context:,}; give a longer text",
            field="text",
        )
    _refuse_unreadable(text, tokenizer, ids)
    count = num_available if max_chunks is None else min(num_available, max_chunks)
    chunks = np.array(ids[: count * context], np.int32).reshape(count, context)
    if tokenizer.prefix_ids:
        chunks[:, 0] = tokenizer.prefix_ids[0]
    return Chunks(chunks, num_available)


def calibration_digests(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """sha256 of the texts that a file says it was made with."""
    found = metadata.get(DIGESTS, ())
    if isinstance(found, str):
        return (found,)
    return tuple(str(one) for one in found) if isinstance(found, Sequence) else ()


def refuse_same_text(calibration: Sequence[str], evaluation: RunningText, model: str) -> None:
    """Refuse to judge a model by a text that it was calibrated with; calibration: sha256 of each of its files."""
    for name, digest in zip(evaluation.names, evaluation.digests, strict=True):
        if digest in calibration:
            raise InvalidParameter(
                f"{name} is the text that {model} was calibrated with, so it says nothing about other text; "
                "evaluate with another one",
                field="text",
            )


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise InvalidParameter(f"{path} is a folder; give a text file", field="text")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise InvalidParameter(f"{path}: {why_unreadable(path, error)}; give a text file", field="text") from None
    if len(content) > MAX_TEXT_BYTES:
        raise InvalidParameter(f"{path} has more than {MAX_TEXT_BYTES:,} bytes; give a part of it", field="text")
    return content


def _decoded(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidParameter(
            f"{path} is not valid UTF-8: byte 0x{content[error.start]:02x} at offset {error.start:,}; convert it first",
            field="text",
        ) from None


def _refuse_unreadable(text: RunningText, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    unknown = tokenizer.unknown_ids
    share = sum(token in unknown for token in ids) / len(ids)
    if share > MAX_UNKNOWN_SHARE:
        raise InvalidParameter(
            f"{share:.0%} of the tokens of {', '.join(text.names)} are unknown to the model; "
            "give a text in a language that it can encode",
            field="text",
        )
