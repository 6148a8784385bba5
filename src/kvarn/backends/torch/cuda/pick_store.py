"""Picks on disk: which kernel was fastest for each product, so that a second start need not time them again.

One small JSON file for each GPU, software and source of the kernels; a pick's bits were compared when it was made, and
all that could change them is in the file's name, so they are not compared again. Knows names and numbers; no tensor.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvarn.config import kvarn_home

log = logging.getLogger("kvarn.backends")

FORMAT = 1
SAVE_EVERY_S = 1.0  # picks of new numbers of rows come in bursts
Stored = list[Any]  # of JSON's types


@dataclass(frozen=True, slots=True)
class Foundation:
    """All that a pick's speed and bits depend on, beside the product."""

    gpu: str
    capability: str
    processors: int  # a part of a GPU has its name, and fewer of them
    driver: str
    torch: str
    cuda: str
    triton: str
    kernels: str  # a hash of their source

    @property
    def file_name(self) -> str:
        text = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        return f"picks-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


class PickStore:
    """The picks of one foundation. Several processes may write: each adds what it found to what is there."""

    def __init__(self, foundation: Foundation, folder: Path) -> None:
        self._foundation = foundation
        self._path = folder / foundation.file_name
        self._new: dict[str, Stored] = {}
        self._saved_at = 0.0
        self._can_save = True
        self._picks = _read(self._path, foundation)

    def __len__(self) -> int:
        return len(self._picks)

    def find(self, key: str) -> Stored | None:
        """What was stored for a product."""
        return self._picks.get(key)

    def add(self, key: str, pick: Stored) -> None:
        """Keep a pick; it is written with the next save()."""
        self._picks[key] = self._new[key] = pick

    def save(self, *, at_once: bool = True) -> None:
        """Write what is new, also beside other processes; not at_once: unless the last time was just now."""
        is_due = at_once or time.monotonic() - self._saved_at >= SAVE_EVERY_S
        if not (self._new and self._can_save and is_due):
            return
        self._picks = {**_read(self._path, self._foundation, logging.DEBUG), **self._picks}
        try:
            _write(self._path, {"format": FORMAT, "foundation": asdict(self._foundation), "picks": self._picks})
        except OSError as error:
            log.warning("the choice of kernels is not kept: %s; the next start makes it again", error)
            self._can_save = False
        self._new = {}
        self._saved_at = time.monotonic()


def open_store() -> PickStore | None:
    """The picks of the current GPU; None where there is no folder for them."""
    import torch

    from kvarn.backends.torch.device import driver_version

    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    foundation = Foundation(
        gpu=device.name,
        capability=f"{device.major}.{device.minor}",
        processors=device.multi_processor_count,
        driver=driver_version(),
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda),
        triton=version("triton"),
        kernels=source_hash(),
    )
    try:
        return PickStore(foundation, picks_folder())
    except (ImportError, OSError) as error:
        log.warning("there is no folder for the choice of kernels: %s; each start makes it anew", error)
        return None


def picks_folder() -> Path:
    return kvarn_home() / "kernels"


def source_hash(folder: Path = Path(__file__).parent) -> str:
    """Of every file of the kernels: a pick is timed again when any of them changes."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def stored_picks() -> Iterator[tuple[Foundation, int, Path]]:
    """What is stored, for `kvarn doctor`: what each file is for, and how many picks it has."""
    for path in sorted(picks_folder().glob("picks-*.json")):
        with suppress(OSError, ValueError, TypeError, KeyError):
            content = json.loads(path.read_bytes())
            yield Foundation(**content["foundation"]), len(content["picks"]), path


def _read(path: Path, foundation: Foundation, level: int = logging.WARNING) -> dict[str, Stored]:
    """The picks of a file; none of one that is missing, broken or not ours."""
    try:
        content = json.loads(path.read_bytes())
        if (content["format"], content["foundation"]) != (FORMAT, asdict(foundation)):
            raise ValueError("it is of another machine or version")
        picks = content["picks"]
        if not all(isinstance(pick, list) for pick in picks.values()):
            raise ValueError("a pick is no list")
        return dict(picks)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        log.log(level, "%s is not used: %s; kernels are chosen anew", path, error or type(error).__name__)
        return {}


def _write(path: Path, content: dict[str, Any]) -> None:
    """The whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "w") as file:
            json.dump(content, file)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
