"""Wheels made on the spot."""

from __future__ import annotations

import base64
import hashlib
import io
import random
import zipfile
from collections.abc import Mapping


def random_bytes(num_bytes: int, seed: int = 0) -> bytes:
    """Bytes that do not compress, like weights."""
    return random.Random(seed).randbytes(num_bytes)


def make_wheel(
    package: str, version: str, members: Mapping[str, bytes], *, recorded: Mapping[str, bytes] = {}
) -> bytes:
    """Build a wheel; `recorded` gives other contents whose digests RECORD then wrongly lists."""
    info = f"{package.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode()
    tags = b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    everything = {**members, f"{info}/METADATA": metadata, f"{info}/WHEEL": tags}
    record = "".join(_record_line(name, recorded.get(name, body)) for name, body in everything.items())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in {**everything, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(name, body)
    return buffer.getvalue()


def _record_line(name: str, body: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).decode().rstrip("=")
    return f"{name},sha256={digest},{len(body)}\n"
