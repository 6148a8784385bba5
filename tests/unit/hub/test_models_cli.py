"""`kvarn pull|ls|rm` as functions of a small app, against loopback servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from kvarn.cli.models import manage
from kvarn.errors import DoesNotFit, ModelNotFound
from kvarn.hub import preflight, store
from tests.unit.hub.servers import Site, add_repository
from tests.unit.hub.wheels import random_bytes

BODY = random_bytes(50_000)

app = typer.Typer()
app.command("pull")(manage.pull)
app.command("ls")(manage.list_models)
app.command("rm")(manage.remove)


def kvarn(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def repo(hub: Site) -> Site:
    add_repository(hub, "org/repo", {"m-Q8_0.gguf": BODY})
    return hub


def test_pull_prints_the_path_last_and_progress_elsewhere(repo: Site) -> None:
    result = kvarn("pull", "hf:org/repo")
    assert result.exit_code == 0
    assert Path(result.stdout.strip()).read_bytes() == BODY
    assert "m-Q8_0.gguf (0.1 MB)" in result.stderr


def test_a_second_pull_fetches_nothing(repo: Site) -> None:
    first = kvarn("pull", "hf:org/repo")
    num_requests = len(repo.requests)
    assert kvarn("pull", "hf:org/repo").stdout == first.stdout
    assert len(repo.requests) == num_requests


def test_ls_shows_name_size_source_digest_and_path(repo: Site) -> None:
    path = kvarn("pull", "hf:org/repo").stdout.strip()
    (model,) = store.list_models()
    listed = kvarn("ls").stdout
    for shown in ("hf:org/repo", "50.0 kB", model.manifest.digest[:12], path):
        assert shown in listed


def test_ls_gives_json(repo: Site) -> None:
    path = kvarn("pull", "hf:org/repo").stdout.strip()
    (row,) = json.loads(kvarn("ls", "--json").stdout)
    assert (row["name"], row["size"], row["path"]) == ("hf:org/repo", len(BODY), path)


def test_ls_of_an_empty_store_says_how_to_fill_it(home: Path) -> None:
    assert "kvarn pull smollm2" in kvarn("ls").stdout
    assert json.loads(kvarn("ls", "--json").stdout) == []


def test_rm_removes_and_a_second_rm_fails(repo: Site) -> None:
    path = Path(kvarn("pull", "hf:org/repo").stdout.strip())
    assert "freed" in kvarn("rm", "hf:org/repo").stdout
    assert not path.exists()
    assert isinstance(kvarn("rm", "hf:org/repo").exception, ModelNotFound)


def test_rm_never_touches_the_users_own_files(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"x")
    result = kvarn("rm", str(file))
    assert isinstance(result.exception, ModelNotFound)
    assert file.exists()


def test_a_dry_run_tells_files_and_sizes_and_fetches_nothing(repo: Site, home: Path) -> None:
    result = kvarn("pull", "hf:org/repo", "--dry-run")
    assert result.exit_code == 0
    for shown in ("m-Q8_0.gguf", "disk: needs 50.0 kB", "memory: needs about 55.0 kB"):
        assert shown in result.stdout
    assert not home.exists()


def test_a_model_larger_than_memory_is_refused_unless_forced(repo: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "MEMORY_PER_FILE_BYTE", 1e12)  # 50 kB now need 50,000 TB
    assert isinstance(kvarn("pull", "hf:org/repo").exception, DoesNotFit)
    dry = kvarn("pull", "hf:org/repo", "--dry-run")
    assert (dry.exit_code, ": does not fit" in dry.stdout) == (1, True)
    assert kvarn("pull", "hf:org/repo", "--force").exit_code == 0


def test_a_local_path_needs_no_pull(home: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert "already" in kvarn("pull", str(tmp_path / "m.gguf")).stdout


@pytest.mark.parametrize("arguments", [("pull",), ("rm",), ("pull", "a", "b"), ("ls", "--nonsense")])
def test_wrong_usage_ends_with_status_2(home: Path, arguments: tuple[str, ...]) -> None:
    assert kvarn(*arguments).exit_code == 2
