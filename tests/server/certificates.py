"""Certificates as an operator makes them: by openssl, for this machine."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")


@dataclass(frozen=True, slots=True)
class Pair:
    """The files of a certificate that is its own authority."""

    cert: Path
    key: Path

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--tls-cert", str(self.cert), "--tls-key", str(self.key))


def make_certificate(folder: Path, name: str = "server", *, password: str | None = None) -> Pair:
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    secret = ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    files = ["-keyout", str(pair.key), "-out", str(pair.cert)]
    words = ["req", "-x509", *curve, *secret, *files, "-days", "2", "-subj", f"/CN={name}", "-addext", NAMES]
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)
    return pair
