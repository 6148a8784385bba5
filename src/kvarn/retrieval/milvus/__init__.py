"""The Retriever on Milvus: a cluster by its URL, or a local file with milvus-lite."""

from __future__ import annotations

from kvarn.retrieval.milvus.index import MilvusIndex

__all__ = ["MilvusIndex"]
