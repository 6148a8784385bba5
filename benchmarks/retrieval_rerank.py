"""Reranking by models that chat, on the judged sets: the hybrid search's best documents, read again by the model.

    python -m benchmarks.retrieval_rerank [SET]... [--models smollm2,qwen-coder] [--questions 60] [--candidates 20]
        [--scores FILE] [--folder FOLDER] [--output DIR]

Reporting questions, the first of each set by a hash of their text; of each candidate document the model reads the chunk
that was found. `--scores` keeps what the models gave, so that a run that was stopped goes on. Prints a table and one
JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.assets import qwen_coder, smollm2
from tests.results import write_result

import kvarn
from benchmarks.judging import Judgement, interval, shown
from benchmarks.retrieval_sets import NUM_DOCUMENTS, SETS, Question
from benchmarks.turns import command_line
from kvarn.bench.report import describe_machine
from kvarn.reranking.rank import rerank
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.types import Hit, Tuning

MODELS: dict[str, Callable[[], Path]] = {"smollm2": smollm2, "qwen-coder": qwen_coder}
Key = tuple[str, str, str]  # model, set, question


@dataclass(frozen=True, slots=True)
class Searched:
    """The questions of a set and what a hybrid search found for each."""

    questions: Sequence[Question]
    hits: Sequence[Sequence[Hit]]

    def judged(self, orders: Sequence[Sequence[int]]) -> Judgement:
        """How good the hits are in these orders."""
        pairs = zip(self.hits, orders, strict=True)
        ranked = [[hits[place].document for place in order] for hits, order in pairs]
        return Judgement.of(ranked, [question.answers for question in self.questions])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=list(SETS), metavar="SET", help=", ".join(SETS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--questions", type=int, default=60, help="of each set, at most")
    parser.add_argument("--candidates", type=int, default=20, help="documents of each question that are read again")
    parser.add_argument("--texts", type=int, default=NUM_DOCUMENTS, help="documents of each set, at most")
    parser.add_argument("--scores", type=Path, help="file that keeps the models' scores")
    parser.add_argument("--folder", type=Path, help="where collections are made and kept, as of retrieval_quality")
    parser.add_argument("--output", type=Path, help="folder for retrieval-rerank.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = {name: searched(name, options.folder or Path(scratch), options) for name in options.sets}
        kept = Scores(options.scores or Path(scratch) / "scores.jsonl")
        for model in options.models.split(","):
            score(model, found, kept)
    rows = {name: _row(name, one, options.models.split(","), kept) for name, one in found.items()}
    for name, row in rows.items():
        for what, value in row.items():
            print(f"{name:12}  {what:48}  {value}", flush=True)
    figures = {"bench": "retrieval-rerank", "candidates": options.candidates, "rows": rows}
    print(json.dumps({**figures, "machine": describe_machine()}))
    if options.output is not None:
        write_result("retrieval-rerank", figures, options.output, command_line("benchmarks.retrieval_rerank"))


def searched(name: str, folder: Path, options: argparse.Namespace) -> Searched:
    """The best documents of each question by the default search, one chunk of each."""
    judged = SETS[name](options.texts)
    questions = judged.part("reporting")[: options.questions]
    with Collection(name, folder=folder) as collection:
        collection.add(judged.documents)
        texts = [question.text for question in questions]
        hits = collection.search_many(texts, options.candidates, tuning=Tuning(per_document=1))
    return Searched(questions, hits)


class Scores:
    """What models gave each candidate, one line of JSON per question, and the CPU seconds it took."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[Key, tuple[list[float], float]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            *key, scores, seconds = json.loads(line)
            self._found[tuple(key)] = (scores, seconds)

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def __getitem__(self, key: Key) -> tuple[list[float], float]:
        return self._found[key]

    def add(self, key: Key, scores: list[float], seconds: float) -> None:
        self._found[key] = (scores, seconds)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([*key, scores, seconds]) + "\n")


def score(model: str, found: dict[str, Searched], kept: Scores) -> None:
    """Ask the model about every candidate that it has not been asked about; the sets in turns."""
    asked = [
        ((model, name, question.text), hits)
        for number in range(max(len(one.questions) for one in found.values()))
        for name, one in found.items()
        for question, hits in zip(one.questions[number : number + 1], one.hits[number : number + 1], strict=True)
    ]
    with kvarn.LLM(MODELS[model](), context=2048) as llm:
        for number, (key, hits) in enumerate(asked, 1):
            if key not in kept:
                began = time.process_time()
                scores = rerank(llm, key[2], [hit.text for hit in hits])
                kept.add(key, [round(float(one), 6) for one in scores], round(time.process_time() - began, 3))
            print(f"\r{model}: {number} of {len(asked)}", end="", flush=True)
    print()


def _row(name: str, found: Searched, models: Sequence[str], kept: Scores) -> dict[str, Any]:
    """The search's own order, the best there could be, and the order of each model."""
    own = found.judged([range(len(hits)) for hits in found.hits])
    best = found.judged([_best_first(*one) for one in zip(found.questions, found.hits, strict=True)])
    row: dict[str, Any] = {"questions": len(found.questions)}
    row |= {"hybrid: nDCG@10": _mean(own.ndcg), "best order of the candidates: nDCG@10": _mean(best.ndcg)}
    for model in models:
        given = [kept[model, name, question.text] for question in found.questions]
        judged = found.judged([_order(scores) for scores, _ in given])
        row[f"{model}: nDCG@10"] = _mean(judged.ndcg)
        row[f"{model} - hybrid"] = shown(interval(judged.ndcg, own.ndcg))
        row[f"{model}: s of CPU time per question, median"] = round(float(np.median([one for _, one in given])), 2)
    return row


def _order(scores: Sequence[float]) -> list[int]:
    """As `retrieval.search.rerank.best_hits`: among equal scores the earlier one first."""
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))


def _best_first(question: Question, hits: Sequence[Hit]) -> list[int]:
    return sorted(range(len(hits)), key=lambda place: hits[place].document not in question.answers)


def _mean(values: Any) -> float:
    return round(float(values.mean()), 4)


if __name__ == "__main__":
    main()
