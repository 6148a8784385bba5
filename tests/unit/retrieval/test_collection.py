"""Collections: what goes in comes out, bad input is a sentence, and nothing is lost."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvarn.errors import CollectionNotFound, InvalidParameter, RetrievalError, StorageError
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.ingest.chunking import Chunking
from kvarn.retrieval.storage import paths
from kvarn.retrieval.storage.document_rows import PLACE_COLUMNS
from kvarn.retrieval.storage.document_store import FILE, DocumentStore
from kvarn.retrieval.storage.embedded_index import EmbeddedIndex
from kvarn.retrieval.types import Document, Tuning
from tests.unit.retrieval.words import WordEmbedder

TEXTS = {
    "mill": "A mill grinds grain into flour with two heavy stones.",
    "bread": "Bread is baked from flour, water and salt in a hot oven.",
    "river": "The river turns the wheel of the mill day and night.",
    "stars": "Astronomers count stars with large telescopes.",
}
DOCUMENTS = [
    Document(text, id=name, source=f"{name}.txt", metadata={"length": len(text)}) for name, text in TEXTS.items()
]


@pytest.mark.parametrize("mode", ["hybrid", "dense", "sparse"])
def test_the_best_hit_comes_first_in_every_mode(tmp_path: Path, mode: Any) -> None:
    with _filled(tmp_path) as collection:
        hit = collection.search("telescopes for stars", 2, mode)[0]
        assert hit.id == "stars#0"
        assert hit.document == "stars"
        assert hit.source == "stars.txt"
        assert TEXTS["stars"][slice(*hit.span)] == hit.text
        assert hit.metadata == {"length": len(TEXTS["stars"])}


def test_several_queries_are_embedded_together_and_answered_in_order(tmp_path: Path) -> None:
    with _filled(tmp_path) as collection:
        answers = collection.search_many(["stars telescopes", "bread oven"], 1)
        assert [hits[0].document for hits in answers] == ["stars", "bread"]


def test_a_changed_document_replaces_the_old_one(tmp_path: Path) -> None:
    with _filled(tmp_path) as collection:
        report = collection.add([Document("Now about ships and harbours.", id="stars", source="stars.txt")])
        assert (report.added, report.updated) == (0, 1)
        assert not [hit for hit in collection.search("telescopes", 10, "sparse") if hit.document == "stars"]
        assert collection.search("harbours", 1, "sparse")[0].document == "stars"


def test_what_did_not_change_is_not_embedded_again(tmp_path: Path) -> None:
    embedder = WordEmbedder()
    with Collection("c", folder=tmp_path, model=embedder) as collection:
        collection.add(DOCUMENTS)
        before, version = embedder.num_embedded, collection.version
        assert collection.add(DOCUMENTS).unchanged == 4
        assert (embedder.num_embedded, collection.version) == (before, version)


def test_equal_content_is_stored_once_and_reported(tmp_path: Path) -> None:
    with _filled(tmp_path) as collection:
        copy = Document(TEXTS["mill"], id="copy", metadata={"length": len(TEXTS["mill"])})
        report = collection.add([copy])
        assert report.duplicates == {"copy": "mill"}
        assert len(collection) == 4


def test_a_document_has_the_same_chunks_after_reopening(tmp_path: Path) -> None:
    with _filled(tmp_path) as collection:
        before = collection.search("the mill", 4)
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        assert collection.search("the mill", 4) == before
        assert collection.stats()["documents"] == 4


def test_a_collection_remembers_its_chunking(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder(), chunking=Chunking(16, 2)) as collection:
        collection.add("one")
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        assert collection.chunking == Chunking(16, 2)
        collection.add(" ".join(f"w{n}" for n in range(100)))
        assert len(collection) > 6


def test_diversity_drops_near_copies(tmp_path: Path) -> None:
    with _filled(tmp_path) as collection:
        collection.add([Document(TEXTS["mill"] + " Indeed.", id="echo")])
        plain = [hit.document for hit in collection.search("mill grinds grain", 2, "dense")]
        diverse = [hit.document for hit in collection.search("mill grinds grain", 2, "dense", tuning=Tuning(mmr=0.3))]
        assert set(plain) == {"mill", "echo"}
        assert set(diverse) != {"mill", "echo"}


@pytest.mark.parametrize("k", [0, -1, 10**9, 1.5, True, "3", None])
def test_a_wrong_k_is_refused(tmp_path: Path, k: Any) -> None:
    with _filled(tmp_path) as collection, pytest.raises(InvalidParameter, match="k is"):
        collection.search("mill", k)


@pytest.mark.parametrize("query", ["", "  \n", 7, None, "\ud800", "x" * 40_000])
def test_a_wrong_query_is_refused(tmp_path: Path, query: Any) -> None:
    with _filled(tmp_path) as collection, pytest.raises(InvalidParameter):
        collection.search(query)


def test_more_hits_than_chunks_gives_all_of_them(tmp_path: Path) -> None:
    with _filled(tmp_path) as collection:
        assert len(collection.search("mill", 10_000, "dense")) == 4


def test_an_empty_collection_finds_nothing(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        assert collection.search("anything") == []


@pytest.mark.parametrize(
    "documents",
    [
        [""],
        ["  \n"],
        [{"text": ""}],
        [{"body": "x"}],
        [7],
        7,
        b"bytes",
        [{"text": "x", "id": ""}],
        [{"text": "x", "metadata": {"a": [1]}}],
        [{"text": "x", "metadata": {"a": float("nan")}}],
        [{"text": "x", "metadata": {"a": 2**80}}],
        [{"text": "x", "kind": "film"}],
        [{"text": "\ud800"}],
        [{"text": "one", "id": "same"}, {"text": "two", "id": "same"}],
    ],
)
def test_a_wrong_document_is_refused_and_nothing_is_lost(tmp_path: Path, documents: Any) -> None:
    with _filled(tmp_path) as collection:
        with pytest.raises(InvalidParameter):
            collection.add(documents)
        assert collection.stats()["documents"] == 4


def test_a_document_of_100_mb_is_refused_by_its_size(tmp_path: Path) -> None:
    with _filled(tmp_path) as collection, pytest.raises(InvalidParameter, match="100,000,000 characters"):
        collection.add("x" * 100_000_000)


def test_a_long_document_without_paragraphs_is_split(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder(), chunking=Chunking(50, 10)) as collection:
        text = " ".join(f"w{n}" for n in range(5_000))
        collection.add(text)
        hits = collection.search("w4999", 1, "sparse")
        assert hits[0].text.endswith("w4999")
        assert text[slice(*hits[0].span)] == hits[0].text


def test_another_embedding_model_is_refused(tmp_path: Path) -> None:
    _filled(tmp_path).close()
    for other in (WordEmbedder(dim=16), WordEmbedder(salt="other")):
        with Collection("c", folder=tmp_path, model=other) as collection:
            with pytest.raises(RetrievalError, match="was made with the embedding model 'words-32'"):
                collection.search("mill")
            with pytest.raises(RetrievalError, match="was made with"):
                collection.add("more")
            assert len(collection.search("mill", 10, "sparse")) == 2


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 65, "a b", 7, None])
def test_a_wrong_name_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(InvalidParameter, match="name"):
        Collection(name, folder=tmp_path, model=WordEmbedder())


def test_an_unknown_collection_is_told_with_the_known_ones(tmp_path: Path) -> None:
    _filled(tmp_path).close()
    with pytest.raises(CollectionNotFound, match="there are: c"):
        Collection.open("nope", folder=tmp_path)


def test_two_processes_cannot_change_one_collection(tmp_path: Path) -> None:
    with _filled(tmp_path), pytest.raises(StorageError, match="another process"):
        Collection("c", folder=tmp_path, model=WordEmbedder())


def test_a_store_from_before_there_were_lines_is_read_and_goes_on(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add([Document("a mill", id="old")])
        folder = collection.folder
    assert folder is not None
    with closing(sqlite3.connect(folder / FILE)) as store:
        for name in PLACE_COLUMNS:
            store.execute(f"ALTER TABLE chunks DROP COLUMN {name}")
        store.commit()
    with Collection.open("c", folder=tmp_path, model=WordEmbedder()) as collection:
        assert collection.search("mill", 1)[0].lines is None
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add([Document("a star", id="new")])
        assert {hit.document: hit.lines for hit in collection.search("mill star", 2)} == {"old": None, "new": (1, 1)}


def test_files_that_a_killed_process_left_in_the_way_of_the_words_are_no_obstacle(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add([Document("a mill grinds", id="mill"), Document("stars shine", id="star")])
        folder = collection.folder
    assert folder is not None
    (index,) = folder.glob("sparse-*")
    for segment in index.glob("*.store"):  # removals of the next change would get one of these names
        for number in range(100):
            segment.with_suffix(f".{number}.del").touch()
    store = DocumentStore(folder, is_writable=True)
    store.remove(["mill"])
    store.close()
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        assert [hit.document for hit in collection.search("mill stars", 5, "sparse")] == ["star"]
        collection._index.check()  # type: ignore[attr-defined]


def test_a_reader_sees_what_the_writer_does(tmp_path: Path) -> None:
    with _filled(tmp_path) as writer, Collection.open("c", folder=tmp_path, model=WordEmbedder()) as reader:
        assert reader.search("harbours", 1, "sparse") == []
        writer.add([Document("Ships in harbours.", id="ships")])
        writer.delete("mill")
        assert reader.search("ships in harbours", 1)[0].document == "ships"
        assert "mill" not in {hit.document for hit in reader.search("mill", 10)}
        with pytest.raises(StorageError, match="reading only"):
            reader.add("nothing")


def test_documents_can_be_deleted_while_others_search(tmp_path: Path) -> None:
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add([Document(f"text about item {n} and mills", id=f"d{n}") for n in range(300)])
        failures: list[BaseException] = []
        done = threading.Event()

        def search() -> None:
            try:
                while not done.is_set():
                    assert all(hit.text for hit in collection.search("item mills", 20))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=search) for _ in range(2)]
        for thread in threads:
            thread.start()
        for start in range(0, 300, 30):
            collection.delete([f"d{n}" for n in range(start, start + 30)])
        done.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert collection.search("item") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_can_be_searched_and_not_changed(tmp_path: Path) -> None:
    _filled(tmp_path).close()
    folders = [tmp_path / "c", *(tmp_path / "c").glob("sparse-*")]
    for folder in folders:
        folder.chmod(0o555)
    try:
        with Collection.open("c", folder=tmp_path, model=WordEmbedder()) as collection:
            assert collection.search("mill")
        with pytest.raises(StorageError, match="read-only"):
            Collection("c", folder=tmp_path, model=WordEmbedder())
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_a_full_disk_loses_nothing_that_was_there(tmp_path: Path) -> None:
    with _filled(tmp_path) as collection:
        index = collection._index
        assert isinstance(index, EmbeddedIndex)
        writer = index.store._writer
        assert writer is not None
        (pages,) = writer.execute("PRAGMA page_count").fetchone()
        writer.execute(f"PRAGMA max_page_count = {pages}")  # what SQLite says then is what it says of a full disk
        with pytest.raises(StorageError, match="full"):
            collection.add([Document(f"filler {n} " * 200, id=f"f{n}") for n in range(50)])
        index.check()
        assert collection.search("telescopes", 1)[0].document == "stars"
        writer.execute("PRAGMA max_page_count = 1000000000")
        assert collection.add("room again").added == 1


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
@pytest.mark.timeout(60)
def test_a_store_that_is_no_file_is_told_with_a_remedy_and_can_be_dropped(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    (tmp_path / "c").mkdir()
    make(tmp_path / "c" / "truth.sqlite")
    for use in (lambda: Collection("c", folder=tmp_path), lambda: Collection.open("c", folder=tmp_path)):
        with pytest.raises(StorageError, match=r"truth\.sqlite is .*, not a file; .*remove the collection"):
            use()
    paths.drop("c", tmp_path)
    with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
        collection.add(DOCUMENTS)
        assert collection.search("telescopes", 1)[0].document == "stars"


def test_a_collection_whose_lock_is_a_folder_can_be_dropped(tmp_path: Path) -> None:
    _filled(tmp_path).close()
    (tmp_path / "c" / "writer.lock").unlink(missing_ok=True)
    (tmp_path / "c" / "writer.lock").mkdir()
    with pytest.raises(StorageError, match=r"writer\.lock|cannot be written"):
        Collection("c", folder=tmp_path, model=WordEmbedder())
    paths.drop("c", tmp_path)
    assert not (tmp_path / "c").exists()


def test_a_dropped_collection_is_gone(tmp_path: Path) -> None:
    _filled(tmp_path).close()
    assert paths.list_names(tmp_path) == ["c"]
    paths.drop("c", tmp_path)
    assert paths.list_names(tmp_path) == []
    with pytest.raises(CollectionNotFound):
        paths.drop("c", tmp_path)


def _filled(folder: Path) -> Collection:
    collection = Collection("c", folder=folder, model=WordEmbedder())
    collection.add(DOCUMENTS)
    return collection
