"""Code search as a test of retrieval: functions of the Python standard library and what their docstrings say they do.

The query is the first sentence of a docstring, the document the function's source without it. Weights and k of the
fusion are chosen on the half whose sha256 is even and judged on the other.
"""

from __future__ import annotations

import ast
import hashlib
import math
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.retrieval.collection import Collection
from kvarn.retrieval.search.fusion import fuse
from kvarn.retrieval.storage.embedded_index import EmbeddedIndex
from kvarn.retrieval.types import Scored, Tuning

K = 10
DEPTH = 50  # candidates of each kind, as in a search for ten
MIN_QUESTION_CHARS = 12
WEIGHTS = ((0.1, 0.9), (0.3, 0.7), (0.5, 0.5), (0.7, 0.3), (0.75, 0.25), (0.8, 0.2), (0.9, 0.1))
RRF_K = (5.0, 20.0, 60.0)
LEFT_OUT = ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that says what it does."""

    name: str
    question: str
    text: str  # the source without the docstring

    @property
    def is_for_choosing(self) -> bool:
        return hashlib.sha256(self.name.encode()).digest()[-1] % 2 == 0


def source_pieces(max_pieces: int, num_chars: int = 300) -> list[str]:
    """Pieces of the library's sources, in the order of a hash of their text."""
    pieces = set()
    for path, _ in _files():
        text = path.read_text(encoding="utf-8", errors="replace")
        pieces.update(text[start : start + num_chars] for start in range(0, len(text), num_chars))
    return sorted(pieces, key=lambda piece: hashlib.sha256(piece.encode()).digest())[:max_pieces]


def standard_library(max_functions: int) -> list[Function]:
    """Functions with a docstring, in the order of a hash of their names; the same for every run."""
    found = {}
    for path, relative in _files():
        found.update({function.name: function for function in _functions(path, relative)})
    ordered = sorted(found.values(), key=lambda function: hashlib.sha256(function.name.encode()).digest())
    return ordered[:max_functions]


def _files() -> Iterator[tuple[Path, Path]]:
    """Sources of the library, and their paths within it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not set(relative.parts) & set(LEFT_OUT):
            yield path, relative


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with the candidates of both kinds, as names of functions: looked up once, fused in many ways."""

    name: str
    dense: list[Scored]
    sparse: list[Scored]


def judge(collection: Collection, functions: Sequence[Function]) -> dict[str, Any]:
    """nDCG@10 of each mode on the half that chose nothing; and what was chosen."""
    documents = _documents(collection)
    choosing = _ask(collection, [function for function in functions if function.is_for_choosing])
    judging = _ask(collection, [function for function in functions if not function.is_for_choosing])
    candidates = [Tuning("rrf", weights, rrf_k) for weights in WEIGHTS for rrf_k in RRF_K]
    candidates += [Tuning("weighted", weights) for weights in WEIGHTS]
    tuning = max(candidates, key=lambda one: _ndcg(choosing, documents, one))
    return {
        "dense: nDCG@10": round(_ndcg(judging, documents, Tuning(weights=(1.0, 0.0))), 4),
        "sparse: nDCG@10": round(_ndcg(judging, documents, Tuning(weights=(0.0, 1.0))), 4),
        "hybrid: nDCG@10": round(_ndcg(judging, documents, tuning), 4),
        "chosen": f"{tuning.fusion}, weights {tuning.weights}, k {tuning.rrf_k:g}",
        "hybrid at defaults: nDCG@10": round(_ndcg(judging, documents, Tuning()), 4),
    }


def _ask(collection: Collection, functions: Sequence[Function]) -> list[Asked]:
    index, asked = collection._index, []
    for start in range(0, len(functions), 256):
        part = functions[start : start + 256]
        vectors = collection._indexer.embed_queries([function.question for function in part], collection.embedder)
        for function, vector in zip(part, vectors, strict=True):
            legs = index.dense(vector, DEPTH, None), index.sparse(function.question, DEPTH, None)
            asked.append(Asked(function.name, *legs))
    return asked


def _ndcg(asked: Sequence[Asked], documents: Mapping[int, str], tuning: Tuning) -> float:
    """Mean of 1 / log2(1 + rank) of the one right document, 0 below the tenth place; a leg of weight 0 is left out."""
    total = 0.0
    for one in asked:
        legs = [leg if weight else [] for leg, weight in zip((one.dense, one.sparse), tuning.weights, strict=True)]
        found = dict.fromkeys(documents[key] for key, _ in fuse(legs, tuning, DEPTH))  # chunks of one count once
        best = list(found)[:K]
        if one.name in best:
            total += 1.0 / math.log2(2 + best.index(one.name))
    return total / max(len(asked), 1)


def _documents(collection: Collection) -> dict[int, str]:
    """The function that each chunk belongs to."""
    index = collection._index
    assert isinstance(index, EmbeddedIndex)
    keys, _ = index.store.changed_since(0)
    return {key: chunk.document for key, chunk in index.store.chunks(keys).items()}


def _functions(path: Path, relative: Path) -> Iterator[Function]:
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        question = _first_sentence(ast.get_docstring(node) or "")
        text = _without_docstring(node, lines)
        if len(question) >= MIN_QUESTION_CHARS and text:
            yield Function(f"{relative.as_posix()}:{node.lineno}:{node.name}", question, text)


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", paragraph, maxsplit=1)[0]


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]) -> str:
    first = node.body[0]
    if len(node.body) < 2 or first.end_lineno is None or node.end_lineno is None:
        return ""
    return "\n".join([*lines[node.lineno - 1 : first.lineno - 1], *lines[first.end_lineno : node.end_lineno]])
