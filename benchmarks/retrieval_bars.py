"""What a bar on the scores of hybrid searches keeps out: questions of one judged set put to the collection of another.

    python -m benchmarks.retrieval_bars [SET]... [--bars 0.30 0.36] [--folder FOLDER] [--output DIR]

Every second question of the reporting parts. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.results import write_result

from benchmarks.retrieval_sets import NUM_DOCUMENTS, SETS, JudgedSet
from benchmarks.turns import command_line
from kvarn.bench.report import describe_machine
from kvarn.retrieval.collection import Collection


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=list(SETS), metavar="SET", help=", ".join(SETS))
    parser.add_argument("--bars", type=float, nargs="+", default=(0.30, 0.36))
    parser.add_argument("--texts", type=int, default=NUM_DOCUMENTS, help="documents of each set, at most")
    parser.add_argument("--folder", type=Path, help="where collections are made and kept, as of retrieval_quality")
    parser.add_argument("--output", type=Path, help="folder for retrieval-bars.json")
    options = parser.parse_args()
    judged = [SETS[name](options.texts) for name in options.sets]
    with tempfile.TemporaryDirectory() as scratch:
        rows = {one.name: kept_out(one, judged, options.folder or Path(scratch), options.bars) for one in judged}
    for name, row in rows.items():
        for what, value in row.items():
            print(f"{name:12}  {what:24}  {value}", flush=True)
    figures = {"bench": "retrieval-bars", "rows": rows}
    print(json.dumps({**figures, "machine": describe_machine()}))
    if options.output is not None:
        write_result("retrieval-bars", figures, options.output, command_line("benchmarks.retrieval_bars"))


def kept_out(judged: JudgedSet, sets: Sequence[JudgedSet], folder: Path, bars: Sequence[float]) -> dict[str, Any]:
    """The share of the other sets' questions, and of its own, that have no hit above each bar."""
    with Collection(judged.name, folder=folder) as collection:
        collection.add(judged.documents)
        best = {one.name: best_scores(collection, one) for one in sets}
    own = best.pop(judged.name)
    others = [score for scores in best.values() for score in scores]
    row: dict[str, Any] = {"questions: others": len(others), "questions: own": len(own)}
    for bar in bars:
        row[f"{bar:.2f}: others"] = _share_below(bar, others)
        row[f"{bar:.2f}: own"] = _share_below(bar, own)
    return row


def best_scores(collection: Collection, asked: JudgedSet) -> list[float]:
    """The score of the best hit of every second question."""
    texts = [question.text for question in asked.part("reporting")][::2]
    return [hits[0].score if hits else 0.0 for hits in collection.search_many(texts, 1)]


def _share_below(bar: float, scores: Sequence[float]) -> float:
    return round(sum(score < bar for score in scores) / max(len(scores), 1), 3)


if __name__ == "__main__":
    main()
