"""On whose behalf a context computes: the priority of work that no request carries, as the embeddings of a search."""

from __future__ import annotations

from contextvars import ContextVar

# Set by whoever takes a caller in; it follows the caller's tasks and asyncio.to_thread by itself.
caller_priority: ContextVar[int] = ContextVar("kvarn_caller_priority", default=0)
