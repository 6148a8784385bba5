"""Models that are part of the installed package: their names and files. Nothing is downloaded or stored for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

FOLDER = Path(__file__).parent / "weights"

BUNDLED: Mapping[str, Path] = MappingProxyType({"tiny-diffusion": FOLDER / "tiny-diffusion.gguf"})


def bundled_name(path: Path) -> str | None:
    """Return the name of a bundled model by its file."""
    return next((name for name, file in BUNDLED.items() if file == path), None)
