"""How many bytes each tenant's collections hold, and whether they may hold more. For one event loop.

Asked of the storage each time, so that it is right after a restart and for what others add. Knows no documents.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvarn.errors import StorageQuotaExceeded

if TYPE_CHECKING:
    from kvarn.retrieval.collection_storage import CollectionStorage
    from kvarn.server.access.keys import Principal

# Bytes on disk for one of text: the text, its overlaps, the vectors twice and the index of terms. Measured: 2 to 4.
STORED_PER_BYTE = 4
EMPTY_BYTES = 128 << 10  # a collection without documents


class StorageQuota:
    """What is being added counts as stored until it has ended."""

    def __init__(self, storage: Callable[[], CollectionStorage]) -> None:
        self._storage = storage
        self._pending: Counter[str] = Counter()  # bytes, by tenant

    @asynccontextmanager
    async def reserved(self, principal: Principal, num_text_bytes: int) -> AsyncIterator[None]:
        """Add so many bytes of text while the block runs, or StorageQuotaExceeded."""
        limit, tenant = principal.tier.storage_bytes, principal.tenant
        if limit is None:
            yield
            return
        num_bytes = STORED_PER_BYTE * num_text_bytes + EMPTY_BYTES
        self._pending[tenant] += num_bytes
        try:
            stored = await asyncio.to_thread(lambda: self._storage().num_bytes(tenant))
            if stored + self._pending[tenant] > limit:
                raise StorageQuotaExceeded(
                    f"the collections of this key hold {stored:,} bytes, and {num_bytes:,} more are needed; tier "
                    f"{principal.tier.name!r} allows {limit:,}: delete documents or collections, or send less"
                )
            yield
        finally:
            self._pending[tenant] -= num_bytes
            if not self._pending[tenant]:
                del self._pending[tenant]
