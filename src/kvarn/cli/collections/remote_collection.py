"""Collections of a running server: files are sent to it, and it reads, embeds and searches. Knows HTTP and files."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvarn.bench.connection import Address
from kvarn.cli.generate.remote import open_response
from kvarn.errors import DocumentError, RequestError
from kvarn.retrieval.ingest.files import decode, kind_of, load_file
from kvarn.retrieval.types import Hit

PATH = "/v1/collections"
MAX_ANSWER_BYTES = 256 << 20
BATCH_BYTES = 1 << 20  # of files that are sent together: a server takes 8 MiB in one request by default
BATCH_FILES = 16
FILE_KINDS = ("pdf", "docx", "epub", "notebook")  # that the server reads in a process of its own
COUNTS = ("added", "updated", "unchanged", "chunks")


class RemoteCollections:
    """The collections of one server."""

    def __init__(self, url: str, key: str | None) -> None:
        self._address = Address.of(url)
        self._key = key

    def names(self) -> list[str]:
        """Those that the key may see."""
        return [str(one["name"]) for one in self.ask("GET", PATH)["data"]]

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The server's answer, a JSON object."""
        connection, response = open_response(self._address, self._key, method, path, body)
        try:
            answer = json.loads(response.read(MAX_ANSWER_BYTES))
        except (OSError, ValueError, RecursionError):
            raise RequestError("the server's answer is not JSON; is it a Kvarn server?") from None
        finally:
            connection.close()
        if not isinstance(answer, dict):
            raise RequestError("the server's answer is not a JSON object; is it a Kvarn server?")
        return answer


class RemoteCollection:
    """One of them."""

    def __init__(self, server: RemoteCollections, name: str) -> None:
        self._ask = server.ask
        self._path = f"{PATH}/{quote(name, safe='')}"
        self._name = name

    def create(self, chunking: Mapping[str, int | None]) -> None:
        """Begin it with this chunking, the server's where it is None; one that exists stays as it is."""
        given = {name: value for name, value in chunking.items() if value is not None}
        self._ask("POST", PATH, {"name": self._name, **given})

    def add(self, files: Sequence[Path]) -> tuple[dict[str, Any], dict[str, str]]:
        """Send files; what was added, and why others could not be read, by path."""
        report: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "duplicates": {}}
        failed: dict[str, str] = {}
        for batch in _batches(files, failed):
            for told in self._add_batch(batch, failed):
                report |= {name: report[name] + told.get(name, 0) for name in COUNTS}
                report["duplicates"] |= told.get("duplicates", {})
        return report, failed

    def delete(self, ids: Sequence[str]) -> int:
        """Remove documents by id, or all of a file or folder; returns how many were there."""
        stored = [one["id"] for one in self.documents()]
        chosen = [id_ for id_ in stored if any(id_ == one or id_.startswith(one.rstrip("/") + "/") for one in ids)]
        parts = [chosen[start : start + 1000] for start in range(0, len(chosen), 1000)]
        return sum(self._ask("POST", f"{self._path}/documents/delete", {"ids": part})["deleted"] for part in parts)

    def documents(self) -> list[dict[str, Any]]:
        """id, source, metadata and number of chunks of every document."""
        return list(self._ask("GET", f"{self._path}/documents")["data"])

    def stats(self) -> dict[str, Any]:
        """Counts and settings."""
        return {name: value for name, value in self._ask("GET", self._path).items() if name != "object"}

    def search(self, body: Mapping[str, Any]) -> list[Hit]:
        """The hits of a search body, best first; what is None is left to the server."""
        given = {name: value for name, value in body.items() if value is not None}
        return [_hit(one) for one in self._ask("POST", f"{self._path}/search", given)["data"]]

    def _add_batch(self, batch: Sequence[dict[str, Any]], failed: dict[str, str]) -> Iterator[dict[str, Any]]:
        """All of a batch, or each of its documents alone where one of them is refused."""
        try:
            yield self._ask("POST", f"{self._path}/documents", {"documents": list(batch)})
        except RequestError as error:
            if len(batch) == 1:
                failed[batch[0]["id"]] = f"{batch[0]['id']}: {error}"
                return
            for one in batch:
                yield from self._add_batch([one], failed)


def _hit(given: Mapping[str, Any]) -> Hit:
    lines, fields = (
        given.get("lines"),
        ("id", "text", "score", "source", "document", "heading", "metadata", "relevance"),
    )
    return Hit(
        **{name: given[name] for name in fields},
        span=(given["span"]["start"], given["span"]["end"]),
        lines=None if lines is None else (lines["first"], lines["last"]),
        page=given.get("page"),
    )


def _batches(files: Sequence[Path], failed: dict[str, str]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    num_bytes = 0
    for path in files:
        try:
            body = _body(path)
        except DocumentError as error:
            failed[error.source] = str(error)
            continue
        size = len(body.get("text", "")) + len(body.get("data", ""))
        if batch and (num_bytes + size > BATCH_BYTES or len(batch) == BATCH_FILES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(body)
        num_bytes += size
    if batch:
        yield batch


def _body(path: Path) -> dict[str, Any]:
    """A file as the server takes it: its text, or its bytes."""
    source = path.as_posix()
    data, kind = load_file(path), kind_of(source) or "text"
    if data.startswith(b"%PDF-"):
        kind = "pdf"
    content = {"data": base64.b64encode(data).decode()} if kind in FILE_KINDS else {"text": decode(data, source)}
    if not any(one.strip() for one in content.values()):
        raise DocumentError("is empty: there is no text in it", source=source)
    return {"id": source, "source": source, "kind": kind, **content}
