from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvarn.errors import DownloadError
from kvarn.hub.download import fetch_file
from kvarn.hub.download.fetch_file import RemoteFile, ServerRefused, fetch, remote_size
from tests.unit.hub.servers import Site, serving
from tests.unit.hub.wheels import random_bytes

BODY = random_bytes(300_000)
SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(fetch_file, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def remote(site: Site) -> RemoteFile:
    site.files["/file"] = BODY
    return RemoteFile(f"{site.url}/file", "file", len(BODY), SHA256)


def part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def test_a_file_arrives_whole_and_leaves_no_part(remote: RemoteFile, tmp_path: Path) -> None:
    target = tmp_path / "new" / "file"
    assert fetch(remote, target) == SHA256
    assert target.read_bytes() == BODY
    assert list(target.parent.iterdir()) == [target]


def test_progress_never_goes_back_and_ends_at_the_size(remote: RemoteFile, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None, str]] = []
    fetch(remote, tmp_path / "file", lambda *report: seen.append(report))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1] == (len(BODY), len(BODY), "file")


def test_a_part_of_an_earlier_run_is_continued(site: Site, remote: RemoteFile, tmp_path: Path) -> None:
    part_of(tmp_path / "file").write_bytes(BODY[:200_000])
    fetch(remote, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert [headers["Range"] for headers in site.asked("/file")] == ["bytes=200000-"]


def test_a_part_of_another_file_is_thrown_away(site: Site, remote: RemoteFile, tmp_path: Path) -> None:
    part_of(tmp_path / "file").write_bytes(b"x" * 1000)
    fetch(remote, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert [headers.get("Range") for headers in site.asked("/file")] == ["bytes=1000-", None]


def test_a_part_longer_than_the_file_is_thrown_away(site: Site, remote: RemoteFile, tmp_path: Path) -> None:
    part_of(tmp_path / "file").write_bytes(BODY + b"more")
    fetch(RemoteFile(remote.url, "file", None, SHA256), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY


def test_a_server_without_ranges_sends_everything_again(site: Site, remote: RemoteFile, tmp_path: Path) -> None:
    site.has_ranges = False
    part_of(tmp_path / "file").write_bytes(BODY[:1000])
    fetch(remote, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY


def test_broken_connections_are_continued_in_the_same_run(site: Site, remote: RemoteFile, tmp_path: Path) -> None:
    site.cuts["/file"] = [100_000, 50_000]
    fetch(remote, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    ranges = [headers.get("Range") for headers in site.asked("/file")]
    assert ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_a_connection_that_keeps_breaking_leaves_a_part_to_continue(
    site: Site, remote: RemoteFile, tmp_path: Path
) -> None:
    site.cuts["/file"] = [10_000] * fetch_file.MAX_ATTEMPTS
    with pytest.raises(DownloadError, match=r"stopped at 50,000 bytes.*continues there"):
        fetch(remote, tmp_path / "file")
    assert part_of(tmp_path / "file").read_bytes() == BODY[:50_000]
    assert not (tmp_path / "file").exists()


def test_a_busy_server_is_asked_again(site: Site, remote: RemoteFile, tmp_path: Path) -> None:
    site.statuses["/file"] = [503, 429]
    assert fetch(remote, tmp_path / "file") == SHA256


def test_a_wrong_checksum_names_both_digests_and_removes_the_file(remote: RemoteFile, tmp_path: Path) -> None:
    expected = "0" * 64
    with pytest.raises(DownloadError, match=f"{SHA256}, expected {expected}"):
        fetch(RemoteFile(remote.url, "file", None, expected), tmp_path / "file")
    assert list(tmp_path.glob("file*")) == []


def test_a_wrong_size_is_refused_when_there_is_no_digest(remote: RemoteFile, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="has 300,000 bytes, expected 300,001"):
        fetch(RemoteFile(remote.url, "file", 300_001), tmp_path / "file")
    assert list(tmp_path.glob("file*")) == []


def test_without_a_digest_an_old_part_is_not_trusted(site: Site, remote: RemoteFile, tmp_path: Path) -> None:
    part_of(tmp_path / "file").write_bytes(b"x" * 1000)
    fetch(RemoteFile(remote.url, "file"), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert "Range" not in site.asked("/file")[0]


def test_a_complete_file_is_not_fetched_again(site: Site, remote: RemoteFile, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BODY)
    fetch(remote, tmp_path / "file")
    assert site.requests == []


def test_a_missing_file_is_refused_with_the_status(site: Site, home: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerRefused, match="404"):
        fetch(RemoteFile(f"{site.url}/none", "none"), tmp_path / "file")
    assert list(tmp_path.glob("file")) == []


def test_a_server_that_is_not_there_is_a_network_error(tmp_path: Path) -> None:
    with serving(Site()) as gone:
        url = gone.url
    with pytest.raises(ServerRefused, match="check the network"):
        fetch(RemoteFile(f"{url}/file", "file"), tmp_path / "file")


def test_an_access_token_is_not_sent_on_to_another_host(site: Site, tmp_path: Path) -> None:
    with serving(Site(files={"/stored": BODY})) as other:
        site.redirects["/file"] = f"{other.url}/stored"
        secret = {"Authorization": "Bearer secret"}
        fetch(RemoteFile(f"{site.url}/file", "file", None, SHA256, secret), tmp_path / "file")
        assert site.asked("/file")[0]["Authorization"] == "Bearer secret"
        assert "Authorization" not in other.asked("/stored")[0]


def test_only_http_addresses_are_fetched(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="only http and https"):
        fetch(RemoteFile("ftp://127.0.0.1/file", "file"), tmp_path / "file")


def test_the_size_is_known_before_the_download(site: Site, remote: RemoteFile) -> None:
    assert remote_size(remote) == len(BODY)
    assert remote_size(RemoteFile(f"{site.url}/none", "none")) is None
    assert site.asked("/file") == []
