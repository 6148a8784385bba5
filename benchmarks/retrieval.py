"""Retrieval, measured: recall, latency, embedding rate, ingestion, hot questions.

    python -m benchmarks.retrieval [recall] [latency] [embed] [ingest] [hot] [--num 5000] [--texts 500] [--output DIR]

Small by default; the full sizes are `--num 100000 --texts 20000`, of `hot` `--texts 300`. Prints a table and one JSON
line, last.
`python -m benchmarks.quiet python -m benchmarks.retrieval latency` keeps other processes out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.results import write_result
from tests.unit.retrieval.words import Float32, clustered, unit

import kvarn
from benchmarks.docstrings import Function, source_pieces, standard_library
from benchmarks.hot_questions import QUESTION, hot_over_http
from benchmarks.turns import command_line
from kvarn.bench.report import describe_machine
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.search.search import SearchOptions, find
from kvarn.retrieval.storage.embedded_index import EmbeddedIndex
from kvarn.retrieval.types import Document, EmbeddedDocument, TextChunk, Tuning

QUERIES = 200
K = 10
PUT = 2000  # chunks of one transaction
SEARCH_ROUNDS = 6  # of all queries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--num", type=int, default=5_000, help="vectors or chunks")
    parser.add_argument("--texts", type=int, default=500, help="texts or functions that are really embedded")
    parser.add_argument("--rounds", type=int, default=5, help="floods before a hot question")
    parser.add_argument("--folder", type=Path, help="where indexes are made; default: a temporary one")
    parser.add_argument("--output", type=Path, help="folder for retrieval-ROW.json: benchmarks/results, say")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for row in options.rows:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            figures[row] = ROWS[row](Path(folder), options)
        for name, value in figures[row].items():
            print(f"{row:8}  {name:40}  {value}", flush=True)
        if options.output is not None:
            write_result(f"retrieval-{row}", figures[row], options.output, command_line("benchmarks.retrieval"))
    print(json.dumps({"bench": "retrieval", "num": options.num, "machine": describe_machine(), "rows": figures}))


def recall(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Recall@10 of the graph against brute force."""
    rng = np.random.default_rng(0)
    num = options.num
    gaussian = unit(rng.standard_normal((num + QUERIES, 384)))
    with kvarn.LLM("minilm") as llm:
        real = llm.embed(source_pieces(options.texts + QUERIES))
    found: dict[str, Any] = {}
    for name, vectors, queries in (
        ("intrinsic dimension 24", clustered(num + QUERIES), QUERIES),
        ("MiniLM of Python sources", real, QUERIES),
        ("i.i.d. Gaussian", gaussian, QUERIES),
    ):
        started = time.perf_counter()
        index = filled(folder / name, vectors[:-queries])
        found[f"{name}: chunks"] = len(vectors) - queries
        found[f"{name}: built in s"] = round(time.perf_counter() - started, 1)
        found[f"{name}: recall@10"] = round(recall_of(index, vectors[:-queries], vectors[-queries:]), 4)
        index.close()
    return found


def recall_of(index: EmbeddedIndex, vectors: Float32, queries: Float32) -> float:
    shares = []
    for query in queries:
        best = {int(n) + 1 for n in np.argpartition(-(vectors @ query), K)[:K]}  # keys count from 1
        shares.append(len(best & {key for key, _ in index.dense(query, K, None)}) / K)
    return float(np.mean(shares))


def latency(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Searches of half as many chunks and of all, with and without the embedding of the query."""
    functions = standard_library(options.num)
    texts = [functions[n % len(functions)].text[:1200] + f" id{n}" for n in range(options.num)]
    questions = [function.question for function in functions][:QUERIES]
    vectors = clustered(options.num)
    asked = list(zip(questions, clustered(QUERIES, seed=1)[: len(questions)], strict=True))
    found: dict[str, Any] = {}
    for num in (options.num // 2, options.num):
        index = filled(folder / str(num), vectors[:num], texts[:num])
        found |= {f"{num:,} chunks: {what}": value for what, value in latencies(index, asked).items()}
        index.close()
    return found


SEARCHES = {
    "hybrid": SearchOptions(K, "hybrid"),
    "hybrid, 50 candidates of each kind": SearchOptions(K, "hybrid", tuning=Tuning(candidates=50)),
    "dense": SearchOptions(K, "dense"),
    "sparse": SearchOptions(K, "sparse"),
}


def latencies(index: EmbeddedIndex, asked: Sequence[tuple[str, Float32]]) -> dict[str, Any]:
    """Milliseconds by the clock over the queries, of each query the least of several rounds."""
    found: dict[str, Any] = {}
    for name, options in SEARCHES.items():
        vectors = [None if options.mode == "sparse" else vector for _, vector in asked]
        work = [lambda q=q, v=v, o=options: find(index, q, v, o) for (q, _), v in zip(asked, vectors, strict=True)]  # type: ignore[misc]
        found |= _percentiles(name, work)
    with kvarn.LLM("minilm") as llm:
        hybrid = SEARCHES["hybrid"]
        work = [lambda q=q: find(index, q, llm.embed(q)[0], hybrid) for q, _ in asked]  # type: ignore[misc]
        return found | _percentiles("hybrid, with embedding", work)


def _percentiles(name: str, work: Sequence[Callable[[], object]]) -> dict[str, Any]:
    rounds = [[seconds(one) for one in work] for _ in range(SEARCH_ROUNDS)]
    times = [min(times) for times in zip(*rounds, strict=True)]
    return {f"{name}: p50 ms": percentile(times, 50), f"{name}: p95 ms": percentile(times, 95)}


def embed(_: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Texts per second, ours and sentence-transformers' (or plain transformers'), two threads, float32."""
    texts = [function.text[:800] for function in standard_library(options.texts)]
    with kvarn.LLM("minilm", threads=2) as llm:
        folder = str(llm_folder())
        texts = [text for text in texts if len(llm.tokenizer.encode(text)) <= 256]
        llm.embed(texts[:8])
        ours_s = min(seconds(lambda: llm.embed(texts)) for _ in range(3))
        mine = llm.embed(texts)
    peer, theirs, theirs_s = peer_embedding(folder, texts)
    cosines = (mine * theirs).sum(axis=1) if theirs is not None else np.array([np.nan])
    return {
        "texts": len(texts),
        "ours, texts/s": round(len(texts) / ours_s, 1),
        f"{peer}, texts/s": round(len(texts) / theirs_s, 1),
        "ratio": round(theirs_s / ours_s, 2),
        "lowest cosine": round(float(cosines.min()), 5),
    }


def peer_embedding(folder: str, texts: Sequence[str]) -> tuple[str, Float32 | None, float]:
    import torch

    torch.set_num_threads(2)
    try:
        from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]
    except ImportError:
        return transformers_embedding(folder, texts)
    model = SentenceTransformer(folder, device="cpu")
    model.encode(list(texts[:8]))
    times = [seconds(lambda: model.encode(list(texts), batch_size=32)) for _ in range(3)]
    return "sentence-transformers", model.encode(list(texts), normalize_embeddings=True), min(times)


def transformers_embedding(folder: str, texts: Sequence[str]) -> tuple[str, Float32, float]:
    """What sentence-transformers does: sorted by length, batches of 32, mean of the token states."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    order = sorted(range(len(texts)), key=lambda n: -len(texts[n]))

    def run() -> Float32:
        out = np.empty((len(texts), model.config.hidden_size), np.float32)
        with torch.inference_mode():
            for start in range(0, len(order), 32):
                part = order[start : start + 32]
                given = tokenizer([texts[n] for n in part], padding=True, return_tensors="pt")
                mask = given["attention_mask"][:, :, None]
                states = model(**given).last_hidden_state * mask
                out[part] = (states.sum(1) / mask.sum(1)).numpy()
        return unit(out)

    run()
    return "transformers", run(), min(seconds(run) for _ in range(2))


def ingest(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Chunks per second through a collection's whole way, but for the embedding model."""
    functions = standard_library(options.num)
    texts = (functions[n % len(functions)].text[:600] + f" id{n}" for n in range(options.num))
    given = MadeVectors(options.num + 1)  # one more: the sentence that tells models apart
    started, started_cpu = time.perf_counter(), time.process_time()
    with Collection("made", folder=folder, model=given) as collection:
        collection.add(Document(text, id=f"d{n}") for n, text in enumerate(texts))
    took, took_cpu = time.perf_counter() - started, time.process_time() - started_cpu
    return {
        "chunks": options.num,
        "chunks/s": round(options.num / took),
        "chunks per second of CPU time": round(options.num / took_cpu),
    }


class MadeVectors:
    """An embedder whose vectors were made before."""

    name = "made"
    max_tokens = 256

    def __init__(self, num: int) -> None:
        self._vectors = clustered(num)
        self._num_given = 0

    def count(self, text: str) -> int:
        return len(text) // 4

    def embed(self, texts: Sequence[str]) -> Float32:
        self._num_given += len(texts)
        return self._vectors[self._num_given - len(texts) : self._num_given]

    def close(self) -> None:
        """There is nothing to free."""


def hot(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A repeated question: its search, the first token of its answer, and that over HTTP behind a flood of others."""
    functions: Sequence[Function] = standard_library(min(options.texts, 300))
    params = kvarn.SamplingParams(max_tokens=1, temperature=0.0)
    messages = [{"role": "user", "content": QUESTION}]
    with Collection("functions", folder=folder) as collection, kvarn.LLM("smollm2", context=2048) as llm:
        collection.add([Document(one.text, id=one.name, kind="code") for one in functions])
        collection.search("warm up")
        llm.chat([{"role": "user", "content": "warm up"}], params)
        searches = [seconds(lambda: collection.search(QUESTION, 4)) for _ in range(3)]
        chats = [seconds(lambda: llm.chat(messages, params, retrieve=collection)) for _ in range(3)]
    return {
        "search: cold ms": round(1e3 * searches[0], 3),
        "search: hot ms": round(1e3 * searches[2], 3),
        "first token: cold ms": round(1e3 * chats[0], 1),
        "first token: hot ms": round(1e3 * chats[2], 1),
        "first token: hot / cold": round(chats[2] / chats[0], 3),
        **hot_over_http(folder, functions, options.rounds),
    }


def filled(folder: Path, vectors: Float32, texts: Sequence[str] | None = None) -> EmbeddedIndex:
    """An index of one-chunk documents."""
    index = EmbeddedIndex(folder)
    for start in range(0, len(vectors), PUT):
        numbers = range(start, min(start + PUT, len(vectors)))
        index.put([_entry(n, vectors[n], texts[n] if texts else f"chunk {n}") for n in numbers])
    index.flush()
    return index


def _entry(number: int, vector: Float32, text: str) -> EmbeddedDocument:
    digest = number.to_bytes(8, "little")
    return EmbeddedDocument(f"d{number}", "", digest, {}, [TextChunk(text, 0, len(text))], vector[None])


def llm_folder() -> Path:
    from kvarn.hub import resolve

    return resolve("minilm", offline=True)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def percentile(times: Sequence[float], share: float) -> float:
    return round(1e3 * float(np.percentile(times, share)), 2)


ROWS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "recall": recall,
    "latency": latency,
    "embed": embed,
    "ingest": ingest,
    "hot": hot,
}

if __name__ == "__main__":
    main()
