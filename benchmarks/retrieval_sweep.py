"""What the defaults of retrieval are chosen by: weights and chunk sizes on the tuning parts of the judged sets.

    python -m benchmarks.retrieval_sweep weights [SET]... [--folder FOLDER] [--output DIR]
    python -m benchmarks.retrieval_sweep chunks [SET]... [--texts 300 300 80] [--sizes 64/0 128/0 128/32]

weights: every weight of meaning, and which one is best when a set is left out, with what that set then has: no set is
judged by a weight that was chosen on it. chunks: sizes/overlaps in tokens of MiniLM, each embedded anew, beside the
default. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.results import write_result

from benchmarks.judging import Floats, Judgement, interval, shown
from benchmarks.retrieval_sets import NUM_DOCUMENTS, SETS, JudgedSet
from benchmarks.turns import command_line
from kvarn.bench.report import describe_machine
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.ingest.chunking import Chunking
from kvarn.retrieval.search.search import SearchOptions, find
from kvarn.retrieval.types import Tuning

K = 10
SIZES = ("64/0", "128/0", "128/32", "200/0", "254/0", "254/32")  # beside the default
WEIGHTS = tuple(round(0.05 * n, 2) for n in range(21))  # of meaning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("weights", "chunks"))
    parser.add_argument("sets", nargs="*", default=list(SETS), metavar="SET", help=", ".join(SETS))
    parser.add_argument("--texts", type=int, nargs="+", default=[NUM_DOCUMENTS], help="documents of each set, at most")
    parser.add_argument("--sizes", type=_size, nargs="+", default=[_size(size) for size in SIZES])
    parser.add_argument("--folder", type=Path, help="where collections are made and kept, as of retrieval_quality")
    parser.add_argument("--output", type=Path, help="folder for retrieval-weights.json or retrieval-chunks.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        texts = options.texts if len(options.texts) > 1 else options.texts * len(options.sets)
        judged = [SETS[name](num) for name, num in zip(options.sets, texts, strict=True)]
        work = weights if options.what == "weights" else chunks
        rows = work(judged, options.folder or Path(scratch), options)
    for name, row in rows.items():
        print(f"{name:24}  {row}", flush=True)
    figures = {"bench": f"retrieval-{options.what}", "rows": rows}
    print(json.dumps({**figures, "machine": describe_machine()}))
    if options.output is not None:
        name = f"retrieval-{options.what}"
        write_result(name, figures, options.output, command_line("benchmarks.retrieval_sweep"))


def weights(judged: Sequence[JudgedSet], folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """nDCG@10 of each weight on each set; and the weight chosen without each set, beside that set's best."""
    found = {one.name: by_weight(one, folder) for one in judged}
    rows: dict[str, Any] = {
        f"{weight:.2f}": {name: round(float(one[weight].mean()), 4) for name, one in found.items()}
        | {"mean": round(float(np.mean([one[weight].mean() for one in found.values()])), 4)}
        for weight in WEIGHTS
    }
    rows["all sets"] = {"weight": best_weight(found)}
    for left_out in found if len(found) > 1 else ():
        weight = best_weight({name: one for name, one in found.items() if name != left_out})
        own = best_weight({left_out: found[left_out]})
        difference = shown(interval(found[left_out][weight], found[left_out][own]))
        rows[f"without {left_out}"] = {"weight": weight, "there": rows[f"{weight:.2f}"][left_out]} | {
            "the set's own": own,
            "chosen - own": difference,
        }
    return rows


def by_weight(judged: JudgedSet, folder: Path) -> dict[float, Any]:
    """nDCG@10 of each tuning question for each weight."""
    questions = judged.part("tuning")
    texts, answers = [one.text for one in questions], [one.answers for one in questions]
    found = {}
    with Collection(judged.name, folder=folder) as collection:
        collection.add(judged.documents)
        asked = list(zip(texts, collection._indexer.embed_queries(texts, collection.embedder), strict=True))
        for weight in WEIGHTS:
            tuning = Tuning(weights=(weight, round(1 - weight, 2)), per_document=1)
            options = SearchOptions(K, "hybrid", tuning=tuning)
            ranked = [[hit.document for hit in find(collection._index, *one, options)] for one in asked]
            found[weight] = Judgement.of(ranked, answers).ndcg
    return found


def best_weight(found: Mapping[str, Mapping[float, Any]]) -> float:
    """The one with the best mean over the sets; of equal ones that nearest to one half."""
    return max(
        WEIGHTS, key=lambda weight: (np.mean([one[weight].mean() for one in found.values()]), -abs(weight - 0.5))
    )


def _size(text: str) -> Chunking:
    """As in `200/32`."""
    return Chunking(*map(int, text.split("/")))


def chunks(judged: Sequence[JudgedSet], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """nDCG@10 of hybrid search on each set, and the number of chunks, for each size and overlap."""
    default = Chunking()
    found = {one: _of_chunking(judged, folder, one) for one in dict.fromkeys([default, *options.sizes])}
    return {f"{one.tokens}/{one.overlap}": _chunking_row(found[one], found[default]) for one in found}


@dataclass(frozen=True, slots=True)
class _Chunked:
    """A set in chunks: how many there are, and nDCG@10 of each tuning question."""

    num_chunks: int
    ndcg: Floats


def _chunking_row(found: Mapping[str, _Chunked], default: Mapping[str, _Chunked]) -> dict[str, Any]:
    """Each set and their mean; differences from the default with their intervals, also over all questions together."""
    row: dict[str, Any] = {"mean": round(float(np.mean([one.ndcg.mean() for one in found.values()])), 4)}
    for name, one in found.items():
        row[name] = {"nDCG@10": round(float(one.ndcg.mean()), 4), "chunks": one.num_chunks, "questions": len(one.ndcg)}
        row[name]["minus the default"] = shown(interval(one.ndcg, default[name].ndcg))
    ours, theirs = (np.concatenate([one.ndcg for one in of.values()]) for of in (found, default))
    return row | {"all questions, minus the default": shown(interval(ours, theirs))}


def _of_chunking(sets: Sequence[JudgedSet], folder: Path, chunking: Chunking) -> dict[str, _Chunked]:
    found = {one.name: _chunked(one, folder, chunking) for one in sets}
    shares = {name: (round(float(one.ndcg.mean()), 4), one.num_chunks) for name, one in found.items()}
    print(f"{chunking.tokens}/{chunking.overlap}", shares, flush=True)
    return found


def _chunked(judged: JudgedSet, folder: Path, chunking: Chunking) -> _Chunked:
    questions = judged.part("tuning")
    known = {document.id for document in judged.documents}
    assert all(one.answers <= known for one in questions)
    name = f"{judged.name}-{chunking.tokens}-{chunking.overlap}"
    with Collection(name, folder=folder, chunking=chunking) as collection:
        collection.add(judged.documents)
        found = collection.search_many([one.text for one in questions], K, tuning=Tuning(per_document=1))
        ranked = [[hit.document for hit in hits] for hits in found]
        return _Chunked(len(collection), Judgement.of(ranked, [one.answers for one in questions]).ndcg)


if __name__ == "__main__":
    main()
