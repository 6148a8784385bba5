"""Models that are installed with Kvarn: their names and files. Nothing is fetched, nothing is stored elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

FOLDER = Path(__file__).parent / "weights"

INCLUDED: Mapping[str, Path] = MappingProxyType({"tiny-diffusion": FOLDER / "tiny-diffusion.gguf"})


def name_of(path: Path) -> str | None:
    """Return the name of an included model by its file."""
    return next((name for name, file in INCLUDED.items() if file == path), None)
