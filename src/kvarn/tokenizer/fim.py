"""Fill in the middle: the tokens a model was trained to be asked with, and the prompt made of them.

    <repo>project <file>a.py ... <file>name <prefix>before<suffix>after<middle>     the answer fits between

Knows ids and texts; knows no request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvarn.errors import UnsupportedModel

if TYPE_CHECKING:
    from kvarn.tokenizer.tokenizer import Tokenizer

PROJECT, FILE_NAME = "myproject", "filename"  # what llama-server calls them, for callers that give no name
LONE = "\u263a"
CHUNK = "\n\n--- snippet ---\n\n"  # between files, for models without a token for that

# GGUF keys: tokenizer.ggml.<name>_token_id. Older files call the first three prefix, suffix and middle.
FIM_KEYS = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle")
_PLAIN = ("<|fim_{0}|>", "<fim_{0}>", "<fim-{0}>", "<|code_{0}|>")  # Qwen, StarCoder and Granite, GLM
_TEXTS: Mapping[str, tuple[str, ...]] = {
    "fim_pre": (*(text.format("prefix") for text in _PLAIN), "<｜fim▁begin｜>", "▁<PRE>", "<PRE>"),
    "fim_suf": (*(text.format("suffix") for text in _PLAIN), "<｜fim▁hole｜>", "▁<SUF>", "<SUF>"),
    "fim_mid": (*(text.format("middle") for text in _PLAIN), "<｜fim▁end｜>", "▁<MID>", "<MID>"),
    "fim_pad": ("<|fim_pad|>", "<fim_pad>", "<fim-pad>"),
    "fim_rep": ("<|repo_name|>", "<|fim_repo|>", "<reponame>", "<repo_name>"),
    "fim_sep": ("<|file_sep|>", "<file_sep>"),
    "end": ("▁<EOT>", "<EOT>"),  # CodeLlama's end of the middle
}
_OLDER = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}


@dataclass(frozen=True, slots=True)
class FimTokens:
    """The ids of one model; stop_ids end the middle in addition to what ends every text."""

    prefix: int
    suffix: int
    middle: int
    repo: int | None
    file: int | None
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Another file of the same project, or a part of it."""

    text: str
    name: str = "tmp"


@dataclass(frozen=True, slots=True)
class Infill:
    """What stands before and after the text to be written, and what else the model may look at."""

    prefix: str
    suffix: str
    files: Sequence[SourceFile] = ()


def find_fim_tokens(ids: Mapping[str, int], named: Mapping[str, int | None] | None = None) -> FimTokens | None:
    """The tokens a file names, else those known by their text; None where one of the three is missing."""
    given = named or {}
    found = {name: _find(name, ids, given) for name in _TEXTS}
    prefix, suffix, middle = found["fim_pre"], found["fim_suf"], found["fim_mid"]
    if prefix is None or suffix is None or middle is None:
        return None
    ends = (found["end"], found["fim_pad"], found["fim_rep"], found["fim_sep"], prefix, suffix, middle)
    stop_ids = tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    return FimTokens(prefix, suffix, middle, found["fim_rep"], found["fim_sep"], stop_ids)


def require_fim(tokenizer: Tokenizer) -> FimTokens:
    """The model's tokens, or UnsupportedModel."""
    if tokenizer.fim is None:
        raise UnsupportedModel(
            "the model has no tokens for filling in the middle (such as <|fim_prefix|>), so nothing can be written "
            "between two texts; leave suffix out, or use a model trained for it, such as Qwen2.5-Coder"
        )
    return tokenizer.fim


def fim_prompt(tokenizer: Tokenizer, infill: Infill, max_tokens: int, *, is_truncated: bool = False) -> list[int]:
    """The ids that ask for the middle. Of other files as much is kept as fits, the last ones first.

    is_truncated: of a prefix that is too long, its end is kept.
    """
    fim = require_fim(tokenizer)
    before = tokenizer.encode(infill.prefix, add_special=False)
    asked = [fim.suffix, *_continued(tokenizer, infill.suffix), fim.middle]
    room = max_tokens - len(tokenizer.prefix_ids) - 1 - len(asked)
    if is_truncated:
        before = _last(before, room)
    others = _last(_other_files(tokenizer, fim, infill.files), room - len(before)) if infill.files else []
    return [*tokenizer.prefix_ids, *others, fim.prefix, *before, *asked]


def _other_files(tokenizer: Tokenizer, fim: FimTokens, files: Sequence[SourceFile]) -> list[int]:
    """Everything before the file in question, its name included."""
    ids = [] if fim.repo is None else [fim.repo, *_continued(tokenizer, f"{PROJECT}\n")]
    for file in files:
        named = _continued(tokenizer, CHUNK if fim.file is None else f"{file.name}\n")
        head = named if fim.file is None else [fim.file, *named]
        ids += [*head, *_continued(tokenizer, file.text)]
    return ids if fim.file is None else [*ids, fim.file, *_continued(tokenizer, f"{FILE_NAME}\n")]


def _continued(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that is not the first: after a character that joins no other, no space is put before it."""
    ids = tokenizer.encode(text, add_special=False)
    if not tokenizer.drops_first_space:
        return ids
    lone, both = (tokenizer.encode(written, add_special=False) for written in (LONE, LONE + text))
    return both[len(lone) :] if both[: len(lone)] == lone else ids


def _last(ids: list[int], count: int) -> list[int]:
    return ids[max(0, len(ids) - max(0, count)) :]


def _find(name: str, ids: Mapping[str, int], named: Mapping[str, int | None]) -> int | None:
    keys = (name, _OLDER.get(name, name))
    given = next((token_id for key in keys if (token_id := named.get(key)) is not None), None)
    if given is not None:
        return given
    return next((ids[text] for text in _TEXTS[name] if text in ids), None)
