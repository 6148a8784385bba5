"""One Embedder of several: texts are dealt out in small pieces, so that the fastest takes the most.

A text's vector does not depend on who computes it, so an index is the same with one or with many. A worker that is lost
gives back its piece, and the others do its work. Knows no processes and no models but through what it is given.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvarn.config import EngineConfig
from kvarn.errors import BackendError
from kvarn.machine import choose_threads
from kvarn.retrieval.embedder import Embedder, ModelEmbedder, Role, embed_as
from kvarn.retrieval.types import Float32

if TYPE_CHECKING:
    from kvarn.llm import LLM

PIECE = 32  # texts


class EmbedWorker(Protocol):
    """What computes vectors; BackendError if it is lost. With embed_as(texts, role) where its model has prompts."""

    def embed(self, texts: Sequence[str]) -> Float32: ...

    def close(self) -> None: ...


class EmbedderPool:
    """An Embedder whose texts are embedded by workers. reference: counts tokens, in this process."""

    def __init__(self, reference: Embedder, workers: Sequence[EmbedWorker]) -> None:
        self._reference = reference
        self._workers = list(workers)
        self._lost: list[EmbedWorker] = []
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(len(workers), "kvarn-embed")

    @property
    def name(self) -> str:
        return self._reference.name

    @property
    def max_tokens(self) -> int:
        return self._reference.max_tokens

    @property
    def num_workers(self) -> int:
        """Those that are not lost."""
        return len(self._workers)

    def count(self, text: str) -> int:
        return self._reference.count(text)

    def embed(self, texts: Sequence[str]) -> Float32:
        return self._embed(texts, None)

    def embed_as(self, texts: Sequence[str], role: Role) -> Float32:
        return self._embed(texts, role)

    def _embed(self, texts: Sequence[str], role: Role | None) -> Float32:
        def work(worker: EmbedWorker) -> None:
            self._work(worker, texts, role, pieces, vectors)

        pieces = deque(range(0, len(texts), PIECE))
        vectors: dict[int, Float32] = {}
        while len(vectors) * PIECE < len(texts):
            if not self._workers:
                raise BackendError(
                    "every embedding process was killed; what was stored stays: run it again, or with fewer workers"
                )
            running = [self._threads.submit(work, one) for one in self._workers]
            for one in running:
                one.result()
        return np.concatenate([vectors[start] for start in sorted(vectors)]) if vectors else self._reference.embed([])

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for one in (*self._workers, *self._lost, self._reference):
            one.close()

    def _work(
        self,
        worker: EmbedWorker,
        texts: Sequence[str],
        role: Role | None,
        pieces: deque[int],
        vectors: dict[int, Float32],
    ) -> None:
        """Take pieces until there are none; a lost worker leaves its piece to the others, and the pool."""
        while True:
            with self._lock:
                if not pieces:
                    return
                start = pieces.popleft()
            try:
                vectors[start] = embed_as(worker, texts[start : start + PIECE], role)
            except BackendError:
                with self._lock:
                    pieces.appendleft(start)
                    self._workers.remove(worker)
                    self._lost.append(worker)
                return
            except BaseException:
                with self._lock:
                    pieces.clear()
                raise


def process_pool(model: str, num_workers: int) -> EmbedderPool:
    """An embedder whose model is loaded by several processes, which share the cores of this machine."""
    from kvarn.llm import LLM

    config = EngineConfig(threads=max(1, choose_threads().count // num_workers), own_process=True)
    with ThreadPoolExecutor(num_workers) as loading:
        llms = list(loading.map(lambda _: LLM(model, config=config), range(num_workers)))
    first = llms[0]  # its tokenizer is in this process, and stays when the other one is lost
    return EmbedderPool(ModelEmbedder(model, find=lambda _: first), [_Engine(llm) for llm in llms])


class _Engine:
    """A loaded model that ends with the pool."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def embed(self, texts: Sequence[str]) -> Float32:
        return self._llm.embed(list(texts))

    def embed_as(self, texts: Sequence[str], role: Role) -> Float32:
        return ModelEmbedder(self._llm).embed_as(texts, role)

    def close(self) -> None:
        self._llm.close()
