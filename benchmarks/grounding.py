"""Questions about this project's documents: which are refused, and which sources support which sentences.

    python -m benchmarks.grounding [--part reporting] [--folder FOLDER] [--output DIR]

`grounding_questions.jsonl` has questions with the passage that answers each, and some that the documents leave open.
`grounding_answers.jsonl` has answers of SmolLM2-135M and Qwen2.5-Coder-0.5B (greedy, 96 tokens, four sources) and,
judged by hand, which sources support which of their sentences. Relevance was chosen on the tuning part of the
questions; attribution is judged by weights and a bar fitted to the answers to four fifths of the questions, in turns.
Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.results import write_result

from benchmarks.turns import command_line
from kvarn.bench.report import describe_machine
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.search.attribution import Features, SourceAttributor
from kvarn.retrieval.search.rag_prompt import MIN_RELEVANCE
from kvarn.retrieval.types import Document, Hit

HERE = Path(__file__).parent
LEFT_OUT = ("LOG.md", "api-reference.md")
K = 4
ABSENT = ("absent: near", "absent: off topic")
MODELS = ("smollm2", "qwen-coder")
NUM_FOLDS = 5  # by question: no weight and no bar has seen the question that it judges
BARS = (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6)
RIDGE = 0.3
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence of an answer and one of its sources, judged by hand."""

    model: str
    question: str
    sentence: str
    number: int
    features: Features
    is_supported: bool

    @property
    def fold(self) -> int:
        return hashlib.sha256(self.question.encode()).digest()[0] % NUM_FOLDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="reporting", choices=("tuning", "reporting"), help="of the questions")
    parser.add_argument("--folder", type=Path, help="where the collection is made and kept")
    parser.add_argument("--output", type=Path, help="folder for grounding.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, Collection("docs", folder=options.folder or scratch) as docs:
        docs.add(pages())
        rows: dict[str, Any] = refusals(docs, options.part) | attributions(docs)
    for what, value in rows.items():
        print(f"{what:55}  {value}", flush=True)
    figures = {"bench": "grounding", "part": options.part, "rows": rows}
    print(json.dumps({**figures, "machine": describe_machine()}))
    if options.output is not None:
        write_result("grounding", figures, options.output, command_line("benchmarks.grounding"))


def pages() -> Iterator[Document]:
    """The documents of the project, without the log and what is generated."""
    for path in sorted((HERE.parent / "docs").glob("*.md")):
        if path.name not in LEFT_OUT:
            yield Document(path.read_text(encoding="utf-8"), id=path.name, source=path.name, kind="markdown")


def refusals(docs: Collection, part: str) -> dict[str, Any]:
    """How many questions of each kind are refused, and how often the passage that answers was found."""
    relevance: dict[str, list[float]] = defaultdict(list)
    found = []
    for row in _rows("grounding_questions.jsonl", part):
        hits = docs.search(row["question"], K)
        kind = f"absent: {row['absent']}" if "absent" in row else "answerable"
        relevance[kind].append(max((hit.relevance or 0.0 for hit in hits), default=0.0))
        if "absent" not in row:
            found.append(any(row["passage"] in hit.text for hit in hits))
    relevance["absent"] = [one for kind in ABSENT for one in relevance[kind]]
    table: dict[str, Any] = {}
    for kind, values in relevance.items():
        refused = sum(value < MIN_RELEVANCE for value in values)
        table[f"{kind}: refused"] = f"{refused} of {len(values)} ({refused / len(values):.0%})"
        table[f"{kind}: median relevance"] = round(float(np.median(values)), 3)
    return table | {"answerable: passage among the sources": f"{sum(found)} of {len(found)}"}


def attributions(docs: Collection) -> dict[str, Any]:
    """Precision and recall of attribution by weights that have not seen the question, and of the written numbers."""
    pairs, spent = _pairs(docs)
    given = np.zeros(len(pairs), bool)
    folds, labels = np.array([pair.fold for pair in pairs]), np.array([pair.is_supported for pair in pairs])
    evidence = np.array([(1.0, *pair.features) for pair in pairs])
    for fold in range(NUM_FOLDS):
        seen = folds != fold
        weights = fitted(evidence[seen], labels[seen])
        bar = max(BARS, key=lambda one: _f1(scores(evidence[seen], weights) >= one, labels[seen]))
        given[~seen] = scores(evidence[~seen], weights) >= bar
    table: dict[str, Any] = {"weights fitted to all": [round(float(one), 1) for one in fitted(evidence, labels)]}
    for model in MODELS:
        ours = {pair for pair, is_given in zip(pairs, given, strict=True) if is_given and pair.model == model}
        truth = {pair for pair in pairs if pair.is_supported and pair.model == model}
        table[f"{model}: pairs of sentence and source"] = _shown(ours, truth)
        table[f"{model}: sources of an answer"] = _shown(_sources(ours), _sources(truth))
        table[f"{model}: sources by the written numbers"] = _shown(_written(model), _sources(truth))
        table[f"{model}: ms of CPU time per answer, median"] = round(1e3 * float(np.median(spent[model])), 1)
    return table


def scores(evidence: Floats, weights: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-evidence @ weights))


def fitted(evidence: Floats, labels: Any) -> Floats:
    """Weights of a logistic function, by Newton's method with a small ridge."""
    weights, ridge = np.zeros(evidence.shape[1]), np.diag([0.0, *[RIDGE] * (evidence.shape[1] - 1)])
    for _ in range(50):
        p = scores(evidence, weights)
        hessian = (evidence.T * (p * (1 - p))) @ evidence + ridge
        weights = weights - np.linalg.solve(hessian, evidence.T @ (p - labels) + ridge @ weights)
    return weights


def _pairs(docs: Collection) -> tuple[list[Pair], dict[str, list[float]]]:
    """Every different sentence with every source; seconds of processor time for each answer."""
    pairs: dict[tuple[str, str, str, int], Pair] = {}
    spent: dict[str, list[float]] = defaultdict(list)
    for row in _rows("grounding_answers.jsonl"):
        for model, answer in row["answers"].items():
            began = time.process_time()
            evidence = _attributor(docs, row).evidence(answer["text"])
            spent[model].append(time.process_time() - began)
            for claim, features, _ in evidence:
                sentence = answer["text"][slice(*claim.span)]
                for number, values in enumerate(features, 1):
                    is_supported = number in answer["supported"].get(sentence, ())
                    key = (model, row["question"], sentence, number)
                    pairs.setdefault(key, Pair(*key, values, is_supported))
    return list(pairs.values()), spent


def _sources(pairs: Iterable[Pair]) -> set[tuple[str, int]]:
    return {(pair.question, pair.number) for pair in pairs}


def _written(model: str) -> set[tuple[str, int]]:
    rows = ((row["question"], row["answers"][model]["text"]) for row in _rows("grounding_answers.jsonl"))
    return {(question, int(number)) for question, text in rows for number in re.findall(r"\[(\d+)\]", text)}


def _shown(ours: set[Any], truth: set[Any]) -> str:
    right = len(ours & truth)
    precision, recall = right / max(len(ours), 1), right / max(len(truth), 1)
    return f"precision {precision:.2f} ({right} of {len(ours)}), recall {recall:.2f} (of {len(truth)})"


def _f1(given: Any, truth: Any) -> float:
    return float(2 * (given & truth).sum() / max(given.sum() + truth.sum(), 1))


def _attributor(docs: Collection, row: dict[str, Any]) -> SourceAttributor:
    hits = [
        Hit(str(n), one["text"], 1.0, one["document"], (0, len(one["text"])), one["document"], one["heading"])
        for n, one in enumerate(row["sources"])
    ]
    return docs.attributor(row["question"], hits)


def _rows(name: str, part: str | None = None) -> Iterator[dict[str, Any]]:
    for line in (HERE / name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if part is None or row["part"] == part:
            yield row


if __name__ == "__main__":
    main()
