"""Peers on the judged sets, beside our rankings: bm25s, LanceDB, LlamaIndex and LangChain at their defaults.

    python -m benchmarks.retrieval_quality --export FOLDER          (where Kvarn is installed)
    pip install lancedb llama-index-core llama-index-retrievers-bm25 langchain-classic langchain-community rank-bm25 bm25s PyStemmer
    python benchmarks/retrieval_peers.py FOLDER [--depth 50]         (where they are)

All get the same chunks and the same vectors; from each, so many chunks are asked for, and the first ten documents among
them are judged. A peer that is not installed is left out. Prints a table and one JSON line.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.judging import Judgement, interval, shown

Ranked = list[list[int]]  # numbers of chunks, best first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what retrieval_quality --export has written")
    parser.add_argument("--depth", type=int, default=50, help="chunks asked for: some belong to the same document")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    for path in sorted(options.folder.glob("*.json")):
        given = json.loads(path.read_text(encoding="utf-8"))
        vectors = np.load(path.with_suffix(".npz"))
        judged = {f"kvarn {name}": Judgement.of(ours, given["answers"]) for name, ours in given["kvarn"].items()}
        for name, peer in PEERS.items():
            try:
                ranked = peer(given, vectors["chunks"], vectors["questions"], options.depth)
            except ImportError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
            documents = [[given["documents"][n] for n in one] for one in ranked]
            judged[name] = Judgement.of(documents, given["answers"])
        rows[path.stem] = _row(judged)
        for what, value in rows[path.stem].items():
            print(f"{path.stem:12}  {what:48}  {value}", flush=True)
    means = {name: round(float(np.mean([row[name] for row in rows.values()])), 4) for name in _first(rows)}
    for name, mean in means.items():
        print(f"{'mean':12}  {name:48}  {mean}")
    print(
        json.dumps(
            {"bench": "retrieval-peers", "depth": options.depth, "versions": _versions(), "rows": rows, "mean": means}
        )
    )


def bm25s_stemmed(given: dict[str, Any], _chunks: Any, _questions: Any, depth: int) -> Ranked:
    """BM25 alone, with stop words and Snowball's stemmer."""
    import bm25s
    import Stemmer

    stemmer = Stemmer.Stemmer("english")
    index = bm25s.BM25()
    options = {"stopwords": "en", "stemmer": stemmer, "show_progress": False}
    index.index(bm25s.tokenize(given["chunks"], **options), show_progress=False)
    asked = bm25s.tokenize(given["questions"], **options)
    found, _ = index.retrieve(asked, k=min(depth, len(given["chunks"])), show_progress=False)
    return [[int(n) for n in one] for one in found]


def lancedb_hybrid(given: dict[str, Any], chunks: Any, questions: Any, depth: int) -> Ranked:
    """Vectors and full-text search, joined by its default reranker (reciprocal ranks)."""
    import lancedb

    with tempfile.TemporaryDirectory() as folder:
        rows = [{"n": n, "text": text, "vector": chunks[n]} for n, text in enumerate(given["chunks"])]
        table = lancedb.connect(folder).create_table("chunks", rows)
        table.create_fts_index("text", stem=True, remove_stop_words=True, language="English")
        asked = zip(given["questions"], questions, strict=True)
        return [
            [row["n"] for row in _lance_query(table, text, vector).limit(depth).to_list()] for text, vector in asked
        ]


def _lance_query(table: Any, text: str, vector: Any) -> Any:
    return table.search(query_type="hybrid").vector(vector).text(text).distance_type("cosine")


def llama_index_fusion(given: dict[str, Any], chunks: Any, questions: Any, depth: int) -> Ranked:
    """QueryFusionRetriever over a vector index and BM25, reciprocal ranks, no generated queries."""
    from llama_index.core import MockEmbedding, VectorStoreIndex
    from llama_index.core.llms import MockLLM
    from llama_index.core.retrievers import QueryFusionRetriever
    from llama_index.core.schema import QueryBundle, TextNode
    from llama_index.retrievers.bm25 import BM25Retriever

    nodes = [TextNode(id_=str(n), text=text, embedding=chunks[n].tolist()) for n, text in enumerate(given["chunks"])]
    dense = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=chunks.shape[1])).as_retriever(
        similarity_top_k=depth
    )
    sparse = BM25Retriever.from_defaults(nodes=nodes, similarity_top_k=depth)
    fusion = QueryFusionRetriever(
        [dense, sparse], llm=MockLLM(), num_queries=1, similarity_top_k=depth, mode="reciprocal_rerank", use_async=False
    )
    asked = zip(given["questions"], questions, strict=True)
    return [
        [int(hit.node.node_id) for hit in fusion.retrieve(QueryBundle(text, embedding=vector.tolist()))]
        for text, vector in asked
    ]


def langchain_ensemble(given: dict[str, Any], chunks: Any, questions: Any, depth: int) -> Ranked:
    """EnsembleRetriever over an in-memory vector store and BM25Retriever, weights one half."""
    from langchain_classic.retrievers import EnsembleRetriever
    from langchain_community.retrievers import BM25Retriever
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever

    documents = [Document(page_content=text, metadata={"n": n}) for n, text in enumerate(given["chunks"])]
    by_question = dict(zip(given["questions"], questions, strict=True))

    class Vectors(BaseRetriever):
        def _get_relevant_documents(self, query: str, **_: Any) -> list[Any]:
            best = np.argsort(-(chunks @ by_question[query]), kind="stable")[:depth]
            return [documents[n] for n in best]

    sparse = BM25Retriever.from_documents(documents, k=depth)
    ensemble = EnsembleRetriever(retrievers=[sparse, Vectors()], weights=[0.5, 0.5])
    return [[one.metadata["n"] for one in ensemble.invoke(text)] for text in given["questions"]]


PEERS: dict[str, Callable[[dict[str, Any], Any, Any, int], Ranked]] = {
    "bm25s, stemmed": bm25s_stemmed,
    "LanceDB hybrid": lancedb_hybrid,
    "LlamaIndex fusion": llama_index_fusion,
    "LangChain ensemble": langchain_ensemble,
}


def _row(judged: dict[str, Judgement]) -> dict[str, Any]:
    ours = judged["kvarn hybrid"]
    found: dict[str, Any] = {f"{name}: nDCG@10": round(float(one.ndcg.mean()), 4) for name, one in judged.items()}
    for name, one in list(judged.items())[1:]:
        found[f"kvarn hybrid - {name}"] = shown(interval(ours.ndcg, one.ndcg))
    return found


def _first(rows: dict[str, Any]) -> list[str]:
    return [name for name in next(iter(rows.values())) if name.endswith("nDCG@10")]


def _versions() -> dict[str, str]:
    found = {}
    for name in ("bm25s", "lancedb", "llama-index-core", "langchain-classic"):
        try:
            found[name] = version(name)
        except ImportError:
            continue
    return found


if __name__ == "__main__":
    main()
