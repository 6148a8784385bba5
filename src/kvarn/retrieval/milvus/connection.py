"""One Milvus by its address: every call has a deadline, and one that is away is not asked again for a moment.

The only module that makes a client. Knows calls and errors; knows no collections.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from kvarn.errors import CollectionNotFound, StorageError
from kvarn.retrieval.extras import require

CONNECT_S = 5.0
READ_S = 5.0
CHANGE_S = 15.0  # of a batch of rows; this and the next are less than a writer's lease
DEFINE_S = 20.0  # to create, load or drop a collection
AWAY_S = 2.0  # after a call without an answer the next ones fail at once
NO_SUCH_COLLECTION = 100  # Milvus's code
DEADLINES_S = {
    **dict.fromkeys(
        ("query", "search", "query_iterator", "has_collection", "list_collections", "list_indexes"), READ_S
    ),
    **dict.fromkeys(("insert", "upsert", "delete"), CHANGE_S),
    **dict.fromkeys(("create_collection", "drop_collection", "load_collection", "create_index", "compact"), DEFINE_S),
}


class MilvusConnection:
    """Milvus's client, connected when it is first needed. uri: http://host:19530, or a path that ends in .db.

    Each method of the client is one of this object's, with a deadline. May be used by several threads and collections.
    """

    def __init__(self, uri: str, token: str = "") -> None:
        self.uri = uri
        self._token = token
        self._client: Any = None
        self._away_until = 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in DEADLINES_S:
            raise AttributeError(name)
        return partial(self._call, name)

    def schema(self) -> Any:
        """An empty schema, whose fields are all named."""
        with self.errors():
            return self._connected().create_schema(auto_id=False, enable_dynamic_field=False)

    def index_params(self) -> Any:
        """An empty list of indexes."""
        with self.errors():
            return self._connected().prepare_index_params()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Errors of Milvus and its transport as StorageError; CollectionNotFound if the collection is gone."""
        try:
            yield
        except Exception as error:
            if not type(error).__module__.startswith(("pymilvus", "grpc")):
                raise
            told = " ".join(str(error).split())[:300]
            if getattr(error, "code", None) == NO_SUCH_COLLECTION:
                raise CollectionNotFound(f"Milvus at {self.uri} has this collection no more: {told}") from error
            if _is_away(error):
                self._away_until = time.monotonic() + AWAY_S
                told += "; check that it runs and can be reached from here"
            raise StorageError(f"Milvus at {self.uri}: {told}") from error

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        with self.errors():
            return getattr(self._connected(), name)(*args, timeout=DEADLINES_S[name], **options)

    def _connected(self) -> Any:
        if time.monotonic() < self._away_until:
            raise StorageError(f"Milvus at {self.uri} did not answer a moment ago; check that it runs")
        if self._client is None:
            pymilvus = require("pymilvus", "milvus")
            logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # it logs what it raises, with tracebacks
            self._client = pymilvus.MilvusClient(self.uri, token=self._token, timeout=CONNECT_S)
        return self._client


def _is_away(error: BaseException) -> bool:
    """Whether nobody answered, or not in time."""
    name = getattr(getattr(error, "code", None), "name", "")  # of gRPC's codes
    told = str(error)
    return name in ("UNAVAILABLE", "DEADLINE_EXCEEDED") or any(
        words in told for words in ("Fail connecting", "UNAVAILABLE", "DEADLINE_EXCEEDED", "Retry timeout")
    )
