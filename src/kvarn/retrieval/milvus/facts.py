"""Values about one collection, by name, in a small Milvus collection beside that of its chunks.

Knows names and values; what they mean is known to store.py, commits.py and lease.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from kvarn.errors import CollectionNotFound, StorageError
from kvarn.retrieval.extras import require
from kvarn.retrieval.milvus.connection import MilvusConnection
from kvarn.retrieval.milvus.expressions import listed

BIRTH = "born-as"  # an id of its own for a collection that is made anew under a name


class CollectionFacts:
    """Names and values that are read together, as they are now; a value is written whole."""

    def __init__(self, connection: MilvusConnection, name: str) -> None:
        self.name = name
        self._connection = connection
        self._birth: str | None = None

    @property
    def exists(self) -> bool:
        return bool(self._connection.has_collection(self.name))

    def open(self) -> None:
        """Create the collection unless it is there; several processes may do so at once."""
        if not self.exists:
            self._create()
        if not self._connection.list_indexes(self.name):  # another process has just created it, or died over it
            self._index()
        self._connection.load_collection(self.name)  # after a restart it is on disk only
        if BIRTH not in self.read():
            self.write({BIRTH: uuid.uuid4().hex})
            self._birth = None

    def read(self) -> dict[str, Any]:
        """All values; CollectionNotFound if the collection was removed, whether or not one of its name is there."""
        fields = ["name", "value"]
        rows = self._connection.query(self.name, filter='name != ""', output_fields=fields)
        values = {row["name"]: _plain(row["value"]) for row in rows}
        birth = values.get(BIRTH)
        if self._birth is not None and birth != self._birth:
            raise CollectionNotFound("the collection was removed meanwhile, and one of its name made; ask again")
        self._birth = birth
        return values

    def write(self, values: Mapping[str, Any]) -> None:
        """Store values, each whole."""
        rows = [{"name": name, "value": _boxed(value), "vector": [0.0, 0.0]} for name, value in values.items()]
        self._connection.upsert(self.name, rows)

    def forget(self, names: Iterable[str]) -> None:
        """Remove values."""
        if some := list(names):
            self._connection.delete(self.name, filter=f"name in {listed(some)}")

    def _create(self) -> None:
        """Milvus requires a vector in every collection."""
        kinds = require("pymilvus", "milvus").DataType
        schema = self._connection.schema()
        schema.add_field("name", kinds.VARCHAR, max_length=256, is_primary=True)
        schema.add_field("value", kinds.JSON)
        schema.add_field("vector", kinds.FLOAT_VECTOR, dim=2)
        try:
            self._connection.create_collection(self.name, schema=schema, consistency_level="Strong")
        except StorageError:
            if not self.exists:  # else another process was faster
                raise

    def _index(self) -> None:
        indexes = self._connection.index_params()
        indexes.add_index("vector", index_type="FLAT", metric_type="IP")
        try:
            self._connection.create_index(self.name, indexes)
        except StorageError:
            if not self._connection.list_indexes(self.name):
                raise


def _boxed(value: Any) -> dict[str, Any]:
    return {"bytes": value.hex()} if isinstance(value, bytes) else {"plain": value}


def _plain(value: Mapping[str, Any]) -> Any:
    return bytes.fromhex(value["bytes"]) if "bytes" in value else value["plain"]
