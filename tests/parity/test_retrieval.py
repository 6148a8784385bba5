"""Retrieval with the real embedding model, from the shell and in chats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvarn
from kvarn.cli.main import app
from tests.assets import minilm, smollm2

pytestmark = pytest.mark.model
Shell = Callable[..., tuple[int, str]]
FILES = {
    "mill.md": "# Mills\n\nA mill grinds grain into flour.\n\n## Water\n\nA river turns the wheel.\n",
    "sky.txt": "Astronomers look at stars with telescopes.",
    "page.html": "<h1>Bread</h1><p>Dough is baked in an oven.",
    "broken.pdf": "%PDF-1.4 nothing",
}


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Runs `kvarn` with a home and some files of its own."""
    monkeypatch.setenv("KVARN_HOME", str(tmp_path / "home"))
    (tmp_path / "files").mkdir()
    for name, text in FILES.items():
        (tmp_path / "files" / name).write_text(text)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(arguments))
        return done.exit_code, done.output

    return run


def test_files_are_indexed_searched_listed_and_removed_from_the_shell(shell: Shell) -> None:
    model = ("--model", str(minilm()))
    code, out = shell("index", "add", "--collection", "docs", *model, "files")
    assert code == 1  # the broken PDF
    assert "3 added" in out
    assert "broken PDF" in out
    code, out = shell("index", "add", "--collection", "docs", *model, "files/mill.md", "files/sky.txt")
    assert (code, "2 unchanged" in out) == (0, True)
    code, out = shell("search", "--collection", "docs", *model, "-k", "1", "--json", "how", "to", "bake", "a", "loaf?")
    (hit,) = json.loads(out)
    assert (code, hit["source"]) == (0, "files/page.html")
    code, out = shell(
        "search", "--collection", "docs", "--mode", "sparse", "--filter", '{"id": "files/mill.md"}', "wheel"
    )
    assert (code, "Mills > Water" in out) == (0, True)
    assert shell("index", "ls") == (0, "docs\n")
    assert "chunks      4" in shell("index", "stats", "--collection", "docs")[1]
    assert "removed 3 documents" in shell("index", "rm", "--collection", "docs", "files")[1]
    assert shell("index", "rm", "--collection", "docs", "--all")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("search", "--collection", "nope", "x"), 1),
        (("search", "--collection", "docs", "-k", "0", "x"), 2),
        (("search", "--collection", "docs", "--mode", "magic", "x"), 2),
        (("search", "--collection", "docs", "--filter", "{", "x"), 2),
        (("index", "add", "--collection", "../up", "files"), 2),
        (("index", "add", "--collection", "docs", "missing"), 2),
        (("index", "rm", "--collection", "docs"), 2),
        (("index", "stats", "--collection", "nope"), 1),
    ],
)
def test_wrong_usage_is_one_sentence(shell: Shell, arguments: tuple[str, ...], code: int) -> None:
    found, out = shell(*arguments)
    assert found == code
    assert out.startswith("kvarn: ")
    assert out.count("\n") == 1


def test_a_chat_cites_what_the_collection_says(tmp_path: Path) -> None:
    params = kvarn.SamplingParams(max_tokens=12, temperature=0.0)
    question = [{"role": "user", "content": "What does the Kvarn mill grind?"}]
    with (
        kvarn.LLM(minilm()) as encoder,
        kvarn.LLM(smollm2(), context=1024) as llm,
        kvarn.Collection("notes", model=encoder, folder=tmp_path) as notes,
    ):
        notes.add([kvarn.Document("The Kvarn mill grinds only blue corn.", id="corn"), "Stars shine at night."])
        first = llm.chat(question, params, retrieve=notes.grounding(k=1))
        assert [citation.id for citation in first.citations] == ["corn#0"]
        assert "corn" in first.text.lower()
        again = llm.chat(question, params, retrieve=notes.grounding(k=1))
        assert (again.text, again.usage.cached_tokens > 16) == (first.text, True)
        with pytest.raises(kvarn.InvalidParameter, match="budget"):
            llm.chat(question, params, retrieve=notes.grounding(budget=2))


def test_a_priority_reaches_the_engine_with_documents_and_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    priorities: list[int] = []
    with (
        kvarn.LLM(minilm()) as encoder,
        kvarn.Collection("notes", model=encoder, folder=tmp_path) as notes,
    ):
        compute = encoder.client.compute

        def recorded(work: Any, num_tokens: int = 0, *, priority: int = 0) -> Any:
            priorities.append(priority)
            return compute(work, num_tokens, priority=priority)

        monkeypatch.setattr(encoder.client, "compute", recorded)
        notes.at_priority(7).add("Stars shine at night.")
        assert priorities == [7, 7]  # what tells models apart, once; then the chunk
        notes.at_priority(-3).search("night")
        notes.search("day")
        assert priorities[2:] == [-3, 0]
        assert len(notes) == 1
