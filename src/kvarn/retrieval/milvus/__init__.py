"""Documents in Milvus: the same contract over a cluster by its URL, or over a local file by milvus-lite."""

from __future__ import annotations

from kvarn.retrieval.milvus.index import MilvusIndex

__all__ = ["MilvusIndex"]
