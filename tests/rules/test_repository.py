"""The repository as a stranger finds it: documents that tell the truth, nothing of the machine it was written on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.rules.tree import ROOT, repository_files, repository_texts, shown

MAX_INSTALL_BYTES = 60_000_000
DOCUMENTS = sorted(path for path in repository_files() if path.suffix == ".md")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PUBLIC_HOSTS = {"pypi.org", ""}
# Spelled in pieces, so that this file does not contain what it looks for.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:work|root|opt|home|Users)" + r"/[\w.-]")
INDEX_URLS = re.compile(
    r"https?://(?!127\.0\.0\.1|localhost)[^\s/]+/(?:[\w.-]+/)*simple\b|(?:index-url|find-links)[= ]+\S*" + r"(?:://|/)"
)


def test_the_readme_opens_with_the_two_commands() -> None:
    first_block = re.search(r"```\w*\n(.*?)```", _read("README.md"), re.DOTALL)
    assert first_block is not None
    commands = [line.partition("#")[0].strip() for line in first_block.group(1).strip().splitlines()]
    assert commands == ["make run", "make test"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=shown)
def test_make_commands_in_a_document_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"`make ([a-z-]+)", text) + re.findall(r"^\s*make ([a-z-]+)", _code(text), re.MULTILINE)
    assert set(named) <= TARGETS


@pytest.mark.parametrize("path", DOCUMENTS, ids=shown)
def test_kvarn_commands_in_a_document_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"`kvarn ([a-z]+)\b", text))
    named |= set(re.findall(r"^\s*(?:\$ )?kvarn ([a-z]+)\b", _code(text), re.MULTILINE))
    assert not [command for command in sorted(named) if not _has_help(command)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=shown)
def test_links_in_a_document_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    local = [link for link in links if not urlsplit(link).scheme]
    assert not [link for link in local if not (path.parent / link).exists()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=shown)
def test_repository_paths_in_a_document_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|csrc|tests|docs|examples|benchmarks)/[\w./-]*)`", text)
    assert not [name for name in named if not (ROOT / name).exists()]


def test_ci_runs_the_readme_test_command_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line for line in _read(".ci/run").splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert lines == ["exec make test"]


def test_no_text_names_a_path_of_somebodys_machine_or_a_package_index() -> None:
    hits = [
        f"{shown(path)}:{number}: {line.strip()[:100]}"
        for path, text in repository_texts()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATHS.search(line) or INDEX_URLS.search(line)
    ]
    assert not hits


def test_no_text_names_the_configured_package_index() -> None:
    config = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    urls = re.findall(r"\w+://[^\s'\"]+", config)
    private = {urlsplit(url).hostname or "" for url in urls} - PUBLIC_HOSTS
    private |= {urlsplit(url).path for url in urls if url.startswith("file:")}
    hits = [(shown(path), name) for path, text in repository_texts() for name in private if name in text]
    assert not hits


@pytest.mark.parametrize("line", ["see /" + "work/x", "in /" + "home/me/x", "(/" + "opt/wheels)"])
def test_the_search_for_machine_paths_finds_one(line: str) -> None:
    assert MACHINE_PATHS.search(line)


@pytest.mark.long
def test_the_base_install_is_under_60_mb_of_wheels(tmp_path: Path) -> None:
    project = tomllib.loads(_read("pyproject.toml"))["project"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "download", "-q", "--only-binary=:all:", "-d", str(tmp_path), *project["dependencies"]],
        check=True,
        timeout=900,
    )
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)], check=True, timeout=1800)
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.whl")}
    assert sum(sizes.values()) < MAX_INSTALL_BYTES, sizes


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _code(text: str) -> str:
    """The fenced and indented code of a Markdown text."""
    fenced = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    indented = re.findall(r"^ {4}\S.*$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return "\n".join([*fenced, *indented])


@cache
def _has_help(command: str) -> bool:
    code = "import sys; from kvarn.cli.main import main; sys.exit(main())"
    arguments = [sys.executable, "-c", code, command, "--help"]
    return subprocess.run(arguments, capture_output=True, timeout=60, check=False).returncode == 0
