"""Quality of retrieval on judged sets: hybrid search beside its halves, on questions that chose nothing.

    python -m benchmarks.retrieval_quality [SET]... [--part reporting] [--export FOLDER] [--folder FOLDER]
        [--output DIR]

--folder keeps the collections, so that a second run embeds nothing. --export writes chunks, vectors, questions and our
rankings for `benchmarks/retrieval_peers.py`, which runs in an environment of its own. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.results import write_result

from benchmarks.judging import Judgement, interval, shown
from benchmarks.retrieval_sets import NUM_DOCUMENTS, SETS, JudgedSet, Question
from benchmarks.turns import command_line
from kvarn.bench.report import describe_machine
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.types import Mode, Tuning

K = 10
LARGER = (20, 100)  # other k for which the first ten must be the same
DEPTH = 50  # chunks asked for where several may be of one document, as of the peers
SYSTEMS: dict[str, tuple[Mode, Tuning, int]] = {
    "hybrid": ("hybrid", Tuning(per_document=1), K),
    "hybrid, 10 chunks": ("hybrid", Tuning(), K),  # the defaults of a search: fewer than ten documents, often
    "hybrid, 50 chunks": ("hybrid", Tuning(), DEPTH),
    "dense": ("dense", Tuning(per_document=1), K),
    "sparse": ("sparse", Tuning(per_document=1), K),
    "reciprocal ranks": ("hybrid", Tuning(fusion="rrf", weights=(0.5, 0.5), per_document=1), K),
}
EXPORTED = ("hybrid", "hybrid, 10 chunks", "hybrid, 50 chunks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=list(SETS), metavar="SET", help=", ".join(SETS))
    parser.add_argument("--part", default="reporting", choices=("tuning", "reporting"))
    parser.add_argument("--texts", type=int, default=NUM_DOCUMENTS, help="documents of each set, at most")
    parser.add_argument("--folder", type=Path, help="where collections are made and kept")
    parser.add_argument("--export", type=Path, help="where to write what the peers need")
    parser.add_argument("--output", type=Path, help="folder for retrieval-quality.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = {name: quality(name, options.folder or Path(scratch), options) for name in options.sets}
    for name, row in rows.items():
        for what, value in row.items():
            print(f"{name:12}  {what:32}  {value}", flush=True)
    figures = {"bench": "retrieval-quality", "part": options.part, "rows": rows}
    print(json.dumps({**figures, "machine": describe_machine()}))
    if options.output is not None:
        write_result("retrieval-quality", figures, options.output, command_line("benchmarks.retrieval_quality"))


def quality(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Every system on one set."""
    judged = SETS[name](options.texts)
    questions = judged.part(options.part)
    with Collection(name, folder=folder) as collection:
        collection.add(judged.documents)
        rankings = {system: _rankings(collection, questions, system) for system in SYSTEMS}
        found: dict[str, Any] = {"documents": len(judged.documents), "chunks": len(collection)}
        found |= {"questions": len(questions), "top 10 that differ for other k": _num_unequal(collection, questions)}
        if options.export is not None:
            export(options.export, judged, questions, collection, {name: rankings[name] for name in EXPORTED})
    answers = [question.answers for question in questions]
    judgements = {system: Judgement.of(ranked, answers) for system, ranked in rankings.items()}
    for system, one in judgements.items():
        found[f"{system}: nDCG@10"] = round(float(one.ndcg.mean()), 4)
        found[f"{system}: recall@10"] = round(float(one.recall.mean()), 4)
    for system in list(SYSTEMS)[1:]:
        found[f"hybrid - {system}"] = shown(interval(judgements["hybrid"].ndcg, judgements[system].ndcg))
    return found


def export(
    folder: Path,
    judged: JudgedSet,
    questions: Sequence[Question],
    collection: Collection,
    ours: Mapping[str, list[list[str]]],
) -> None:
    """One JSON file and one of vectors per set: the peers get the same chunks, the same vectors, the same questions."""
    folder.mkdir(parents=True, exist_ok=True)
    store: Any = collection._index.store
    keys, _ = store.changed_since(0)
    chunks, vectors = store.chunks(keys), store.vectors(keys)
    texts = [question.text for question in questions]
    content = {
        "documents": [chunks[key].document for key in keys],
        "chunks": [chunks[key].chunk.searchable for key in keys],
        "questions": texts,
        "answers": [sorted(question.answers) for question in questions],
        "kvarn": ours,
    }
    (folder / f"{judged.name}.json").write_text(json.dumps(content), encoding="utf-8")
    asked = collection._indexer.embed_queries(texts, collection.embedder)
    np.savez(folder / f"{judged.name}.npz", chunks=np.array([vectors[key] for key in keys]), questions=asked)


def _rankings(collection: Collection, questions: Sequence[Question], system: str) -> list[list[str]]:
    mode, tuning, k = SYSTEMS[system]
    found = collection.search_many([question.text for question in questions], k, mode, None, tuning)
    return [[hit.document for hit in hits] for hits in found]


def _num_unequal(collection: Collection, questions: Sequence[Question]) -> int:
    texts = [question.text for question in questions]
    first = collection.search_many(texts, K)
    others = [collection.search_many(texts, k) for k in LARGER]
    return sum(any(hits != more[n][:K] for more in others) for n, hits in enumerate(first))


if __name__ == "__main__":
    main()
