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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.retrieval.collection import Collection
from kvarn.retrieval.types import Mode, Tuning

K = 10
MIN_QUESTION_CHARS = 12
WEIGHTS = ((0.3, 0.7), (0.5, 0.5), (0.7, 0.3), (0.8, 0.2))
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


def standard_library(max_functions: int) -> list[Function]:
    """Functions with a docstring, in the order of a hash of their names; the same for every run."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not set(relative.parts) & set(LEFT_OUT):
            found.update({function.name: function for function in _functions(path, relative)})
    ordered = sorted(found.values(), key=lambda function: hashlib.sha256(function.name.encode()).digest())
    return ordered[:max_functions]


def judge(collection: Collection, functions: Sequence[Function]) -> dict[str, Any]:
    """nDCG@10 of each mode on the half that chose nothing; and what was chosen."""
    choosing = [function for function in functions if function.is_for_choosing]
    judging = [function for function in functions if not function.is_for_choosing]
    candidates = [Tuning(fusion, weights) for fusion in ("rrf", "weighted") for weights in WEIGHTS]  # type: ignore[arg-type]
    tuning = max(candidates, key=lambda one: ndcg(collection, choosing, "hybrid", one))
    scores = {mode: ndcg(collection, judging, mode, tuning) for mode in ("dense", "sparse", "hybrid")}  # type: ignore[arg-type]
    return {f"{mode}: nDCG@10": round(score, 4) for mode, score in scores.items()} | {
        "chosen": f"{tuning.fusion} {tuning.weights}",
        "hybrid at defaults: nDCG@10": round(ndcg(collection, judging, "hybrid", Tuning()), 4),
    }


def ndcg(collection: Collection, functions: Sequence[Function], mode: Mode, tuning: Tuning) -> float:
    """Mean of 1 / log2(1 + rank) of the one right document, 0 below the tenth place."""
    total = 0.0
    for start in range(0, len(functions), 256):
        part = functions[start : start + 256]
        found = collection.search_many([one.question for one in part], 3 * K, mode, None, tuning)
        for function, hits in zip(part, found, strict=True):
            documents = list(dict.fromkeys(hit.document for hit in hits))[:K]  # chunks of one function count once
            if function.name in documents:
                total += 1.0 / math.log2(2 + documents.index(function.name))
    return total / max(len(functions), 1)


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
