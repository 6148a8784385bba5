"""Collections over HTTP: documents in, hits and cited answers out, each tenant its own."""

from __future__ import annotations

import base64
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvarn.cli.main import app
from tests.server.asking import CHAT, answer, chat_body, chunks, refusal
from tests.server.keyed import KeyedServer
from tests.server.process import MINILM, SMOLLM2, ServerProcess, model_path
from tests.unit.retrieval.archives import entity_bomb, make_docx, paragraph
from tests.unit.retrieval.pdfs import bomb, make_pdf

pytestmark = pytest.mark.model
DOCUMENTS = [
    {"id": "mill", "text": "A mill grinds grain into flour with two heavy stones.", "metadata": {"topic": "food"}},
    {"id": "bread", "text": "Bread is baked from flour, water and salt in a hot oven.", "metadata": {"topic": "food"}},
    {"id": "stars", "text": "Astronomers count stars with large telescopes.", "metadata": {"topic": "sky"}},
    {"id": "page", "text": "<h1>Ships</h1><p>Ships sail to <b>harbours</b>.", "kind": "html", "source": "ships.html"},
]


@pytest.fixture(scope="module")
def filled(server: ServerProcess) -> Iterator[httpx.Client]:
    """A client of a server with the collection `things`."""
    with server.client() as client:
        client.delete("/v1/collections/things")
        answer(client, "/v1/collections", {"name": "things"})
        added = answer(client, "/v1/collections/things/documents", {"documents": DOCUMENTS})
        assert (added["added"], added["chunks"]) == (4, 4)
        yield client


def search(client: httpx.Client, query: Any, **fields: Any) -> list[Any]:
    found: list[Any] = answer(client, "/v1/collections/things/search", {"query": query, **fields})["data"]
    return found


@pytest.mark.parametrize("mode", ["hybrid", "dense", "sparse"])
def test_the_best_hit_comes_first(filled: httpx.Client, mode: str) -> None:
    hit = search(filled, "counting stars with telescopes", k=2, mode=mode)[0]
    assert (hit["id"], hit["span"]) == ("stars#0", {"start": 0, "end": 46})
    assert hit["metadata"] == {"topic": "sky"}


def test_several_queries_filters_and_highlights(filled: httpx.Client) -> None:
    first, second = search(filled, ["flour", "telescopes"], k=1, filter={"topic": "food"}, highlights=True)
    assert {first[0]["document"], second[0]["document"]} <= {"mill", "bread"}
    assert first[0]["highlights"]


def test_a_search_may_be_reranked(filled: httpx.Client) -> None:
    hits = search(filled, "flour", k=2, rerank=SMOLLM2)
    assert 1 > hits[0]["score"] >= hits[1]["score"] > 0


def test_the_tokens_of_a_reranking_model_are_charged_to_the_caller(keyed: KeyedServer) -> None:
    path, query = "/v1/collections/judged", "Which of the old machines turns grain into flour?"
    wanted = {"query": query, "k": 3, "rerank": SMOLLM2}
    with keyed.client("alice") as alice, keyed.client("reranker") as client:
        answer(alice, "/v1/collections", {"name": "judged"})
        answer(alice, f"{path}/documents", {"documents": DOCUMENTS[:1]})
        plain = answer(alice, f"{path}/search", {"query": query})["usage"]["prompt_tokens"]
        first = client.post(f"{path}/search", json=wanted)
        used = first.json()["usage"]["prompt_tokens"]
        assert used > plain + 40
        assert int(first.headers["x-ratelimit-remaining-tokens"]) == 120 - used
        refused = client.post(f"{path}/search", json=wanted)
        assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (429, True)
        assert int(refused.headers["x-ratelimit-remaining-tokens"]) == 120 - used - plain
        answer(alice, f"{path}/documents", {"documents": DOCUMENTS})
        too_many = refusal(client, f"{path}/search", {**wanted, "query": "flour"})  # four documents never fit
        assert "allows 120 a minute" in too_many["message"]


def test_a_pdf_is_read_and_found(filled: httpx.Client) -> None:
    sent = {"id": "book", "kind": "pdf", "data": _base64(make_pdf("Peacocks dance in the rain", 2)), "source": "b.pdf"}
    assert answer(filled, "/v1/collections/things/documents", {"documents": [sent]})["added"] == 1
    hit = search(filled, "peacocks", k=1)[0]
    assert (hit["document"], hit["source"]) == ("book", "b.pdf")
    assert "Peacocks dance in the rain\n\n\fPeacocks" in hit["text"]
    assert (hit["page"], "lines" in hit) == (1, False)
    assert answer(filled, "/v1/collections/things/documents", {"documents": [sent]})["unchanged"] == 1
    answer(filled, "/v1/collections/things/documents/delete", {"ids": ["book"]})


def test_a_word_document_is_read_and_a_text_knows_its_lines(filled: httpx.Client) -> None:
    word = {"id": "w", "kind": "docx", "data": _base64(make_docx(paragraph("Walruses sleep on the ice")))}
    code = {"id": "c", "kind": "code", "text": "x = 1\n\ndef walrus():\n    return 'ivory tusks'\n"}
    answer(filled, "/v1/collections/things/documents", {"documents": [word, code]})
    assert search(filled, "walruses on ice", k=1)[0]["text"] == "Walruses sleep on the ice"
    hit = search(filled, "ivory tusks", k=1, mode="sparse")[0]
    assert (hit["document"], hit["lines"]) == ("c", {"first": 3, "last": 4})
    bomb = {"documents": [{"kind": "docx", "data": _base64(entity_bomb()), "source": "bad"}]}
    assert "declares entities" in refusal(filled, "/v1/collections/things/documents", bomb)["message"]
    answer(filled, "/v1/collections/things/documents/delete", {"ids": ["w", "c"]})


def test_files_are_sent_from_the_command_line(filled: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Ibexes climb dams")
    (tmp_path / "word.docx").write_bytes(make_docx(paragraph("Lynxes hunt at dusk")))
    (tmp_path / "bad.docx").write_bytes(entity_bomb())
    (tmp_path / "binary.txt").write_bytes(b"\x7fELF\0")
    server = ["--collection", "things", "--url", str(filled.base_url)]
    done = CliRunner().invoke(app, ["index", "add", *server, str(tmp_path)])
    assert done.exit_code == 1
    assert "2 added, 0 updated, 0 unchanged, 2 chunks, 2 could not be read" in done.output
    assert "declares entities" in done.output
    assert search(filled, "lynxes", k=1)[0]["source"] == (tmp_path / "word.docx").as_posix()
    assert "removed 2 documents" in CliRunner().invoke(app, ["index", "rm", *server, str(tmp_path)]).output


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"%PDF-1.7 nothing", "broken PDF"),
        (b"no PDF at all", "broken PDF"),
        (make_pdf(""), "without text"),
        (make_pdf("x", 3000), "3,000 pages, at most 2,000"),
        (make_pdf("x").replace(b"/Kids [3 0 R]", b"/Kids [2 0 R]"), "PDF"),  # pages that hold themselves
        (bomb(400_000_000), "PDF"),
    ],
    ids=["header only", "other bytes", "no text", "pages", "circle", "bomb"],
)
def test_a_hostile_pdf_is_a_wrong_request(filled: httpx.Client, data: bytes, words: str) -> None:
    sent = {"documents": [DOCUMENTS[0], {"kind": "pdf", "data": _base64(data), "source": "bad PDF"}]}
    error = refusal(filled, "/v1/collections/things/documents", sent)
    assert error["message"].startswith("bad PDF: ")
    assert words in error["message"]


def test_html_is_kept_as_text(filled: httpx.Client) -> None:
    hit = search(filled, "harbours", k=1)[0]
    assert (hit["source"], hit["heading"]) == ("ships.html", "Ships")
    assert "<b>" not in hit["text"]


def test_hostile_html_is_a_wrong_request_at_once(filled: httpx.Client, patience: float) -> None:
    sent = {"documents": [{"kind": "html", "text": "<svg>" + "<a " * 100_000, "source": "bad.html"}]}
    began = time.monotonic()
    assert "is empty" in refusal(filled, "/v1/collections/things/documents", sent)["message"]
    assert time.monotonic() - began < 3 * patience


def test_a_chat_with_retrieval_cites_its_sources(filled: httpx.Client) -> None:
    body = chat_body("What does a mill do?", retrieval={"collection": "things", "k": 2}, max_tokens=24)
    told = answer(filled, CHAT, body)
    plain = answer(filled, CHAT, chat_body("What does a mill do?", max_tokens=24))
    assert told["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 20
    citations = told["retrieval"]["citations"]
    assert [one["number"] for one in citations] == [1, 2]
    assert "mill#0" in {one["id"] for one in citations}
    assert all(one["cited"] in (True, False) and one["span"]["end"] > 0 for one in citations)
    assert all(0 <= one["relevance"] <= 1 for one in citations)
    _check_support(told["retrieval"], told["choices"][0]["message"]["content"])


def test_citations_have_the_passages_that_were_read_where_they_are_asked_for(filled: httpx.Client) -> None:
    texts = {document["id"]: document["text"] for document in DOCUMENTS}
    retrieval = {"collection": "things", "k": 2, "return_passages": True}
    body = chat_body("What does a mill do?", retrieval=retrieval, max_tokens=4)
    for citation in answer(filled, CHAT, body)["retrieval"]["citations"]:
        assert citation["text"] == texts[citation["document"]]
    first, *_, last = chunks(filled, CHAT, body)
    assert {one["text"] for one in first["retrieval"]["citations"]} <= set(texts.values())
    assert all("text" not in one for one in last["retrieval"]["citations"])  # told once


def _check_support(told: dict[str, Any], content: str) -> None:
    """Every sentence lies in the answer; sources are cited because a sentence has a passage in them."""
    texts = {document["id"]: document["text"] for document in DOCUMENTS}
    supporting = set()
    for sentence in told["sentences"]:
        assert sentence["choice"] == 0
        assert content[sentence["span"]["start"] : sentence["span"]["end"]].strip()
        assert sentence["supported"] == bool(sentence["passages"])
        supporting |= {passage["number"] for passage in sentence["passages"]}
    assert {one["number"] for one in told["citations"] if one["cited"]} == supporting
    for citation in told["citations"]:
        assert citation["span"]["end"] <= len(texts[citation["document"]])


def test_a_stream_begins_with_its_sources(filled: httpx.Client) -> None:
    read = chunks(filled, CHAT, chat_body("What does a mill do?", retrieval={"collection": "things", "k": 1}))
    assert read[0]["choices"] == []
    assert read[0]["retrieval"]["citations"][0]["id"] == "mill#0"
    assert "text" not in read[0]["retrieval"]["citations"][0]
    assert all("retrieval" not in chunk for chunk in read[1:-1])


def test_a_stream_ends_with_what_supports_it_as_the_whole_answer_tells(filled: httpx.Client) -> None:
    fields = {"retrieval": {"collection": "things", "k": 2}, "max_tokens": 32, "temperature": 0}
    read = chunks(filled, CHAT, chat_body("What does a mill do with grain?", **fields))
    told = answer(filled, CHAT, chat_body("What does a mill do with grain?", **fields))
    content = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in read if chunk["choices"])
    assert content == told["choices"][0]["message"]["content"]
    assert read[-1]["choices"] == []
    assert read[-1]["retrieval"] == told["retrieval"]
    _check_support(read[-1]["retrieval"], content)


def test_a_question_beside_the_documents_is_refused(filled: httpx.Client) -> None:
    fields: dict[str, Any] = {"retrieval": {"collection": "things", "refusal": "Nobody wrote of that."}}
    told = answer(filled, CHAT, chat_body("Which currency is used in Norway?", **fields))
    assert told["choices"][0]["message"]["content"] == "Nobody wrote of that."
    assert told["retrieval"] == {"citations": [], "left_out": [], "refused": True, "sentences": []}
    assert told["choices"][0]["finish_reason"] == "stop"
    read = chunks(filled, CHAT, chat_body("Which currency is used in Norway?", **fields))
    assert read[0]["retrieval"]["refused"] is True
    fields["retrieval"]["min_relevance"] = 0
    assert answer(filled, CHAT, chat_body("Which currency is used in Norway?", **fields))["retrieval"]["citations"]


def test_every_sentence_may_have_to_name_a_source(filled: httpx.Client) -> None:
    wanted = {"collection": "things", "k": 2, "cite": "every_sentence"}
    told = answer(filled, CHAT, chat_body("What does a mill do?", retrieval=wanted, max_tokens=60, temperature=0))
    first, _, rest = told["choices"][0]["message"]["content"].partition(" [")
    assert first
    assert rest[:1] in ("1", "2") or told["choices"][0]["finish_reason"] == "length"


def test_a_budget_too_small_is_refused_and_a_small_one_reports_what_it_leaves_out(filled: httpx.Client) -> None:
    wanted = {"collection": "things", "k": 3, "mode": "dense"}
    error = refusal(filled, CHAT, chat_body("flour", retrieval={**wanted, "max_context_tokens": 3}))
    assert "budget for sources is 3" in error["message"]
    told = answer(filled, CHAT, chat_body("flour", retrieval={**wanted, "max_context_tokens": 30}))["retrieval"]
    assert len(told["citations"]) + len(told["left_out"]) == 3
    assert told["left_out"]


def test_a_repeated_query_is_answered_from_the_caches(filled: httpx.Client) -> None:
    body = chat_body("Who counts the stars at night?", retrieval={"collection": "things", "k": 2}, max_tokens=1)
    first = answer(filled, CHAT, body)
    for _ in range(2):
        again = answer(filled, CHAT, body)
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    lines = filled.get("/metrics").text.splitlines()
    assert any(line.startswith("kvarn_retrieval_hot_hits_total") and not line.endswith(" 0.0") for line in lines)


def test_a_frequent_prompt_is_warmed_again_when_documents_change(filled: httpx.Client) -> None:
    body = chat_body(
        "How many moons does the red planet have?", retrieval={"collection": "things", "k": 1}, max_tokens=1
    )
    before = _metric(filled, "kvarn_retrieval_primed_total")
    for _ in range(3):
        answer(filled, CHAT, body)
    _until_primed(filled, before)  # it is kept from now on
    before = _metric(filled, "kvarn_retrieval_primed_total")
    added = {"documents": [{"id": "mars", "text": "The red planet Mars has two moons, Phobos and Deimos." * 4}]}
    answer(filled, "/v1/collections/things/documents", added)
    _until_primed(filled, before)
    told = answer(filled, CHAT, body)
    assert told["retrieval"]["citations"][0]["id"] == "mars#0"
    usage = told["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 40
    answer(filled, "/v1/collections/things/documents/delete", {"ids": ["mars"]})


def test_documents_are_listed_replaced_and_deleted(filled: httpx.Client) -> None:
    path = "/v1/collections/extra"
    answer(filled, "/v1/collections", {"name": "extra", "chunk_tokens": 64, "overlap": 8})
    assert "extra" in {one["name"] for one in filled.get("/v1/collections").json()["data"]}
    answer(filled, f"{path}/documents", {"documents": [{"id": "a/b", "text": "one"}, {"id": "c", "text": "two"}]})
    assert answer(filled, f"{path}/documents", {"documents": [{"id": "c", "text": "three"}]})["updated"] == 1
    assert {one["id"] for one in filled.get(f"{path}/documents").json()["data"]} == {"a/b", "c"}
    assert answer(filled, f"{path}/documents/delete", {"ids": ["a/b", "nope"]})["deleted"] == 1
    assert filled.get(path).json()["documents"] == 1
    assert filled.delete(path).json() == {"deleted": 1}
    assert filled.get(path).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("search", {"query": "x", "k": 0}, "k"),
        ("search", {"query": "x", "k": 10**9}, "k"),
        ("search", {"query": ""}, "query"),
        ("search", {"query": "x", "weights": [1.0]}, "weights"),
        ("search", {"query": "x", "filter": {"a": {"like": "b"}}}, "filter"),
        ("documents", {"documents": []}, "documents"),
        ("documents", {"documents": [{"text": ""}]}, "documents.0.text"),
        ("documents", {"documents": [{"text": " "}]}, "documents.0"),
        ("documents", {"documents": [{"text": "a", "id": "x"}, {"text": "b", "id": "x"}]}, "documents"),
        ("documents", {"documents": [{"text": "a", "metadata": {"b": [1]}}]}, "documents.0.metadata.b"),
        ("documents", {"documents": [{"kind": "pdf", "data": "no base64!"}]}, "documents.0.data"),
        ("documents", {"documents": [{"kind": "pdf", "text": "a"}]}, "documents.0"),
        ("documents", {"documents": [{"data": "AAAA"}]}, "documents.0"),
        ("documents", {"documents": [{"text": "a", "data": "AAAA", "kind": "pdf"}]}, "documents.0"),
        ("documents", {"documents": [{"id": "a"}]}, "documents.0"),
        ("documents", {"documents": [{"kind": "pdf", "data": "AAAA"}] * 33}, "documents"),
        ("documents/delete", {"ids": []}, "ids"),
    ],
)
def test_wrong_bodies_are_refused(filled: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    assert refusal(filled, f"/v1/collections/things/{path}", body)["param"] == param


def test_an_unknown_collection_is_not_found(filled: httpx.Client) -> None:
    for path, body in (
        ("/v1/collections/nope/search", {"query": "x"}),
        (CHAT, chat_body(retrieval={"collection": "nope"})),
    ):
        assert refusal(filled, path, body, 404)["code"] == "collection_not_found"
    assert filled.get("/v1/collections/..%2f..").status_code in (400, 404)


def test_tenants_do_not_see_each_other(keyed: KeyedServer) -> None:
    with keyed.client("alice") as alice, keyed.client("anna") as anna, keyed.client("bert") as bert:
        answer(alice, "/v1/collections", {"name": "private"})
        added = {"documents": [{"id": "secret", "text": "The password is swordfish."}]}
        answer(alice, "/v1/collections/private/documents", added)
        wanted = {"query": "password", "mode": "sparse"}
        assert answer(anna, "/v1/collections/private/search", wanted)["data"][0]["document"] == "secret"
        assert refusal(bert, "/v1/collections/private/search", wanted, 404)["message"].endswith("none yet")
        assert bert.get("/v1/collections").json()["data"] == []
        assert bert.delete("/v1/collections/private").status_code == 404
        answer(bert, "/v1/collections", {"name": "private"})
        assert answer(bert, "/v1/collections/private/search", wanted)["data"] == []
        chat = chat_body("password?", retrieval={"collection": "private"})
        assert answer(bert, CHAT, chat)["retrieval"]["citations"] == []


def test_collections_survive_a_restart_and_kill(tmp_path: Path) -> None:
    models = ("--model", model_path(MINILM))
    for number in range(2):
        with ServerProcess(*models, env={"KVARN_HOME": str(tmp_path)}) as process, process.client() as client:
            answer(client, "/v1/collections", {"name": "kept", "chunk_tokens": 16 if number == 0 else 64, "overlap": 2})
            assert client.get("/v1/collections/kept").json()["documents"] == number
            answer(
                client,
                "/v1/collections/kept/documents",
                {"documents": [{"id": f"d{number}", "text": f"grain {number} " * 20}]},
            )
            assert client.get("/v1/collections/kept").json()["chunks"] >= 3 * (number + 1)
            process.process.kill()


def test_of_two_servers_with_one_home_one_writes_and_the_other_takes_over_when_it_ends(tmp_path: Path) -> None:
    models, home = ("--model", model_path(MINILM), "--drain-delay", "0"), {"KVARN_HOME": str(tmp_path)}
    documents, search = "/v1/collections/shared/documents", "/v1/collections/shared/search"
    with (
        ServerProcess(*models, env=home) as first,
        ServerProcess(*models, env=home) as second,
        first.client() as writer,
        second.client() as reader,
    ):
        answer(writer, "/v1/collections", {"name": "shared"})
        answer(writer, documents, {"documents": [{"id": "a", "text": "a mill grinds grain"}]})
        assert [hit["document"] for hit in answer(reader, search, {"query": "grain"})["data"]] == ["a"]
        more = {"documents": [{"id": "b", "text": "water turns the wheel"}]}
        for path, body in ((documents, more), (f"{documents}/delete", {"ids": ["a"]})):
            error = refusal(reader, path, body, 503)
            assert error["code"] == "collection_locked"
            assert "send changes to that server" in error["message"]
        assert reader.delete("/v1/collections/shared").json()["error"]["code"] == "collection_locked"
        assert first.stop() == 0
        assert answer(reader, documents, more)["added"] == 1
        assert {hit["document"] for hit in answer(reader, search, {"query": "grain"})["data"]} == {"a", "b"}


def test_more_collections_than_open_files_are_served_in_turn(tmp_path: Path) -> None:
    models = ("--model", model_path(SMOLLM2), "--model", model_path(MINILM))
    with ServerProcess(*models, env={"KVARN_HOME": str(tmp_path)}) as process, process.client() as client:
        resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE, (300, 300))
        names = [f"c{number}" for number in range(45)]
        for name in names:
            answer(client, "/v1/collections", {"name": name})
        assert [client.get(f"/v1/collections/{name}").status_code for name in names] == [200] * len(names)


def test_a_server_without_an_encoder_says_so(tmp_path: Path) -> None:
    home = {"KVARN_HOME": str(tmp_path)}
    with ServerProcess("--model", model_path(SMOLLM2), env=home) as process, process.client() as client:
        error = refusal(client, "/v1/collections", {"name": "x"})
        assert "no embedding model" in error["message"]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _until_primed(client: httpx.Client, before: float) -> None:
    """Until prompts were computed, and no more of them for two seconds: those of other tests are frequent, too."""
    deadline, last, changed_at = time.monotonic() + 60, before, time.monotonic()
    while time.monotonic() < deadline and (last == before or time.monotonic() - changed_at < 2):
        time.sleep(0.2)
        if (now := _metric(client, "kvarn_retrieval_primed_total")) != last:
            last, changed_at = now, time.monotonic()


def _metric(client: httpx.Client, name: str) -> float:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(lines[0].rpartition(" ")[2])
