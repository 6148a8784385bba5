"""Flags that say where collections are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn.config import require_milvus_uri

if TYPE_CHECKING:
    from kvarn.retrieval.collection_storage import CollectionStorage


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """In folders of this machine unless a Milvus is named."""

    milvus_uri: Annotated[
        str | None, typer.Option(metavar="http://…", help="Collections on this Milvus, as http://127.0.0.1:19530.")
    ] = None
    milvus_token_file: Annotated[
        Path | None, typer.Option(readable=False, help="File with its token; by default MILVUS_TOKEN, if set.")
    ] = None

    def storage(self) -> CollectionStorage:
        """The storage that is named; ConfigError if the address is none."""
        from kvarn.retrieval.collection_storage import collection_storage

        if self.milvus_uri is not None:
            require_milvus_uri(self.milvus_uri)
        return collection_storage(self.milvus_uri or "", self.milvus_token_file)
