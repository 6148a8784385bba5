"""The prefix cache on disk: KV blocks that survive a restart. See docs/prefix-cache.md."""
