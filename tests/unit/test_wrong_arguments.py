"""A wrong argument of any public function is one of our errors, with the value and what to give instead."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvarn
from kvarn import LLM, AsyncLLM, Collection, EngineConfig, KvarnError, SamplingParams
from kvarn.retrieval.ingest.chunking import Chunking
from tests.chat_model import write_chat_model
from tests.unit.retrieval.words import WordEmbedder

ONE = SamplingParams(max_tokens=1, temperature=0.0)
HI = [{"role": "user", "content": "hi"}]


class Unprintable:
    """Its repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def circle() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


WRONG: dict[str, Any] = {
    "number": 5,
    "true": True,
    "fraction": 1.5,
    "text": "x",
    "bytes": b"x",
    "object": object(),
    "dict": {"a": object()},
    "list": [object()],
    "text list": ["x"],
    "class": SamplingParams,
    "array": np.array(5),
    "numbers": np.array([1.5, 2.5]),
    "huge": 10**5000,
    "circle": circle(),
    "unprintable": Unprintable(),
    "function": print,
    "set": {1},
    "NUL": "a\0b",
    "surrogate": "\ud800",
}
TEXTS = frozenset({"text", "NUL"})  # fine where a text is wanted


@dataclass(frozen=True, slots=True)
class World:
    """What the functions are called on."""

    llm: LLM
    asynchronous: AsyncLLM
    collection: Collection
    folder: Path

    @property
    def model(self) -> str:
        return str(self.folder / "tiny.gguf")

    @property
    def text(self) -> str:
        return str(self.folder / "text.txt")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    write_chat_model(folder / "tiny.gguf")
    (folder / "text.txt").write_text("the quick brown fox " * 400)
    asynchronous = AsyncLLM(str(folder / "tiny.gguf"), backend="reference", context=200)
    asyncio.run(asynchronous.load())
    with Collection("c", folder=folder, model=WordEmbedder()) as collection:
        collection.add("the quick brown fox")
        yield World(asynchronous.llm, asynchronous, collection, folder)
    asyncio.run(asynchronous.close())


Call = Callable[[World, Any], Any]
CALLS: Mapping[str, tuple[Call, frozenset[str]]] = {  # with the values that are not wrong there
    "LLM(model)": (lambda w, x: LLM(x), frozenset()),
    "LLM(config)": (lambda w, x: LLM(w.model, config=x), frozenset()),
    "LLM(threads)": (lambda w, x: LLM(w.model, threads=x, backend="reference"), frozenset({"number"})),
    "LLM(backend)": (lambda w, x: LLM(w.model, backend=x), frozenset()),
    "LLM(progress)": (lambda w, x: LLM(w.model, backend="reference", progress=x), frozenset({"function", "class"})),
    "generate(prompt)": (lambda w, x: w.llm.generate(x, ONE), TEXTS | {"text list"}),
    "generate(params)": (lambda w, x: w.llm.generate("hi", x), frozenset()),
    "generate(params of each)": (lambda w, x: w.llm.generate(["hi", "ho"], [ONE, x]), frozenset()),
    "submit(prompt)": (lambda w, x: w.llm.submit(x, ONE).result(), TEXTS),
    "submit(on_token)": (lambda w, x: w.llm.submit("hi", ONE, x).cancel(), frozenset({"function", "class"})),
    "submit(tenant)": (lambda w, x: w.llm.submit("hi", ONE, tenant=x).result(), TEXTS | {"surrogate"}),
    "result(timeout)": (lambda w, x: w.llm.submit("hi", ONE).result(x), frozenset({"number", "fraction"})),
    "chat(messages)": (lambda w, x: w.llm.chat(x, ONE), frozenset()),
    "chat(message)": (lambda w, x: w.llm.chat([x], ONE), frozenset()),
    "chat(content)": (lambda w, x: w.llm.chat([{"role": "user", "content": x}], ONE), TEXTS),
    "chat(role)": (lambda w, x: w.llm.chat([{"role": x, "content": "hi"}], ONE), frozenset()),
    "chat(params)": (lambda w, x: w.llm.chat(HI, x), frozenset()),
    "chat(tools)": (lambda w, x: w.llm.chat(HI, ONE, x), frozenset()),
    "chat(retrieve)": (lambda w, x: w.llm.chat(HI, ONE, retrieve=x), frozenset()),
    "chat(messages) with sources": (lambda w, x: w.llm.chat(x, ONE, retrieve=w.collection), frozenset()),
    "chat(content) with sources": (
        lambda w, x: w.llm.chat([{"role": "user", "content": x}], ONE, retrieve=w.collection),
        TEXTS,
    ),
    "stream(prompt)": (lambda w, x: list(w.llm.stream(x, ONE)), TEXTS),
    "stream(params)": (lambda w, x: w.llm.stream("hi", x), frozenset()),
    "stream(tools)": (lambda w, x: w.llm.stream(HI, ONE, x), frozenset()),
    "infill(prefix)": (lambda w, x: w.llm.infill(x, "x", ONE), frozenset()),
    "infill(suffix)": (lambda w, x: w.llm.infill("x", x, ONE), frozenset()),
    "infill(params)": (lambda w, x: w.llm.infill("x", "x", x), frozenset()),
    "score(token_ids)": (lambda w, x: w.llm.score(x), frozenset()),
    "embed(texts)": (lambda w, x: w.llm.embed(x), frozenset()),
    "classify(pairs)": (lambda w, x: w.llm.classify(x), frozenset()),
    "drain(timeout_s)": (lambda w, x: w.llm.drain(x), frozenset({"number", "fraction"})),
    "tokenizer.encode": (lambda w, x: w.llm.tokenizer.encode(x), TEXTS),
    "tokenizer.decode": (lambda w, x: w.llm.tokenizer.decode(x), frozenset()),
    "async generate(prompt)": (lambda w, x: run(w.asynchronous.generate(x, ONE)), TEXTS | {"text list"}),
    "async generate(params)": (lambda w, x: run(w.asynchronous.generate("hi", x)), frozenset()),
    "async chat(messages)": (lambda w, x: run(w.asynchronous.chat(x, ONE)), frozenset()),
    "async chat(params)": (lambda w, x: run(w.asynchronous.chat(HI, x)), frozenset()),
    "async chat(retrieve)": (lambda w, x: run(w.asynchronous.chat(HI, ONE, retrieve=x)), frozenset()),
    "async stream(prompt)": (lambda w, x: run(first(w.asynchronous, x, ONE)), TEXTS),
    "async stream(params)": (lambda w, x: run(first(w.asynchronous, "hi", x)), frozenset()),
    "async infill(prefix)": (lambda w, x: run(w.asynchronous.infill(x, "x", ONE)), frozenset()),
    "async score": (lambda w, x: run(w.asynchronous.score(x)), frozenset()),
    "async embed": (lambda w, x: run(w.asynchronous.embed(x)), frozenset()),
    "rerank(query)": (lambda w, x: w.llm.rerank(x, ["y"]), TEXTS),
    "rerank(documents)": (lambda w, x: w.llm.rerank("y", x), frozenset({"text list"})),
    "rerank(top_n)": (lambda w, x: w.llm.rerank("y", ["z"], top_n=x), frozenset({"number", "nothing"})),
    "async rerank(query)": (lambda w, x: run(w.asynchronous.rerank(x, ["y"])), TEXTS),
    "async drain": (lambda w, x: run(w.asynchronous.drain(x)), frozenset({"number", "fraction"})),
    "Collection(name)": (
        lambda w, x: Collection(x, folder=w.folder, model=WordEmbedder()).close(),
        frozenset({"text"}),
    ),
    "Collection(model)": (lambda w, x: Collection("m", folder=w.folder, model=x).close(), TEXTS | {"surrogate"}),
    "Collection(folder)": (lambda w, x: Collection("f", folder=x, model=WordEmbedder()).close(), frozenset({"text"})),
    "Collection(chunking)": (
        lambda w, x: Collection("h", folder=w.folder, model=WordEmbedder(), chunking=x).close(),
        frozenset(),
    ),
    "Collection.open(name)": (lambda w, x: Collection.open(x, folder=w.folder), frozenset()),
    "add(documents)": (lambda w, x: w.collection.add(x), TEXTS | {"text list"}),
    "add(document)": (lambda w, x: w.collection.add([x]), TEXTS),
    "add(on_added)": (lambda w, x: w.collection.add("y", on_added=x), frozenset({"function", "class"})),
    "delete(ids)": (lambda w, x: w.collection.delete(x), TEXTS | {"text list"}),
    "search(query)": (lambda w, x: w.collection.search(x), TEXTS),
    "search(k)": (lambda w, x: w.collection.search("x", x), frozenset({"number"})),
    "search(mode)": (lambda w, x: w.collection.search("x", 1, x), frozenset()),
    "search(filter)": (lambda w, x: w.collection.search("x", 1, "sparse", x), frozenset()),
    "search(tuning)": (lambda w, x: w.collection.search("x", 1, tuning=x), frozenset()),
    "search(rerank)": (lambda w, x: w.collection.search("x", 1, rerank=x), frozenset()),
    "search_many(queries)": (lambda w, x: w.collection.search_many(x), frozenset({"text list"})),
    "hot_question(query)": (lambda w, x: w.collection.hot_question(x), TEXTS),
    "at_priority": (lambda w, x: w.collection.at_priority(x), frozenset({"number"})),
    "with_embedder": (lambda w, x: w.collection.with_embedder(x), TEXTS | {"surrogate"}),
    "ids_from": (lambda w, x: w.collection.ids_from(x), TEXTS),
    "ground(messages)": (lambda w, x: w.collection.ground(x, len, 100), frozenset()),
    "ground(count)": (lambda w, x: w.collection.ground(HI, x, 100), frozenset({"function", "class"})),
    "ground(context)": (lambda w, x: w.collection.ground(HI, len, x), frozenset({"number"})),
    "grounding(k)": (lambda w, x: w.collection.grounding(k=x), frozenset({"number"})),
    "grounding(filter)": (lambda w, x: w.collection.grounding(filter=x), frozenset()),
    "grounding(budget)": (lambda w, x: w.collection.grounding(budget=x), frozenset({"number"})),
    "grounding(query)": (lambda w, x: w.collection.grounding(query=x), TEXTS | {"surrogate"}),
    "grounding(tuning)": (lambda w, x: w.collection.grounding(tuning=x), frozenset()),
    "evaluate(model)": (lambda w, x: kvarn.evaluate(x, text=w.text), frozenset()),
    "evaluate(text)": (lambda w, x: kvarn.evaluate(w.model, text=x), frozenset()),
    "evaluate(against)": (lambda w, x: kvarn.evaluate(w.model, text=w.text, against=x), frozenset()),
    "evaluate(options)": (lambda w, x: kvarn.evaluate(w.model, text=w.text, options=x), frozenset()),
    "quantize(source)": (lambda w, x: kvarn.quantize(x, "Q8_0", w.folder / "out.gguf"), frozenset()),
    "quantize(type)": (lambda w, x: kvarn.quantize(w.model, x, w.folder / "out.gguf"), frozenset()),
    "quantize(output)": (lambda w, x: kvarn.quantize(w.model, "Q8_0", x), frozenset({"text"})),
    "quantize(options)": (lambda w, x: kvarn.quantize(w.model, "Q8_0", w.folder / "out.gguf", options=x), frozenset()),
    "collect_imatrix(model)": (lambda w, x: kvarn.collect_imatrix(x, w.folder / "i.gguf", text=w.text), frozenset()),
    "collect_imatrix(text)": (lambda w, x: kvarn.collect_imatrix(w.model, w.folder / "i.gguf", text=x), frozenset()),
    "collect_imatrix(options)": (
        lambda w, x: kvarn.collect_imatrix(w.model, w.folder / "i.gguf", text=w.text, options=x),
        frozenset(),
    ),
    "collect_imatrix(output)": (
        lambda w, x: kvarn.collect_imatrix(w.model, x, text=w.text, options=kvarn.ImatrixOptions(4, 16)),
        frozenset({"text"}),
    ),
    "prune(source)": (lambda w, x: kvarn.prune(x, kvarn.PruneTarget(keep=1.0), w.folder / "out.gguf"), frozenset()),
    "prune(target)": (lambda w, x: kvarn.prune(w.model, x, w.folder / "out.gguf"), frozenset()),
    "prune(output)": (lambda w, x: kvarn.prune(w.model, kvarn.PruneTarget(keep=1.0), x), frozenset({"text"})),
    "prune(options)": (
        lambda w, x: kvarn.prune(w.model, kvarn.PruneTarget(keep=1.0), w.folder / "out.gguf", options=x),
        frozenset(),
    ),
    "register_sampler(name)": (lambda w, x: kvarn.register_sampler(x, print), TEXTS | {"surrogate"}),
    "register_sampler(function)": (lambda w, x: kvarn.register_sampler("x", x), frozenset({"function", "class"})),
    "JsonSchema": (lambda w, x: kvarn.JsonSchema(x), frozenset({"true"})),
    "Regex": (lambda w, x: kvarn.Regex(x), TEXTS),
    "Grammar": (lambda w, x: kvarn.Grammar(x), TEXTS),
}


def run(work: Any) -> Any:
    async def waited() -> Any:
        return await work

    return asyncio.run(waited())


async def first(llm: AsyncLLM, prompt: Any, params: Any) -> Any:
    async with llm.stream(prompt, params) as events:
        return await anext(events)


# Classes of values, each of whose fields is tried; what a field accepts is for its own tests.
VALUES = (
    *(SamplingParams, EngineConfig, kvarn.DiffusionParams, kvarn.SparseConfig, kvarn.Document, kvarn.Tuning, Chunking),
    *(kvarn.QuantizeOptions, kvarn.EvaluationOptions, kvarn.ImatrixOptions, kvarn.SizeTarget),
    *(kvarn.PruneTarget, kvarn.PruneOptions),
)
FIELDS = [(made, name) for made in VALUES for name in inspect.signature(made).parameters]
REMEDY = re.compile(r"; |give |choose |use |leave |set |not |no ")


CASES = [
    pytest.param(name, value, id=f"{name} {kind}")
    for name, (_, fine) in CALLS.items()
    for kind, value in WRONG.items()
    if kind not in fine
]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_wrong_argument_is_told_in_a_sentence(world: World, name: str, value: Any) -> None:
    with pytest.raises(KvarnError) as refused:
        CALLS[name][0](world, value)
    assert REMEDY.search(str(refused.value))
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(("made", "name"), FIELDS, ids=lambda one: getattr(one, "__name__", one))
def test_a_wrong_field_is_told_in_a_sentence(made: Any, name: str) -> None:
    needed = {"text": "x"} if made is kvarn.Document else {}
    refusals = []
    for value in WRONG.values():
        try:
            made(**{**needed, name: value})
        except KvarnError as error:
            refusals.append(str(error))
    assert len(refusals) >= len(WRONG) // 2, "hardly any value is wrong for it"
    assert all(map(REMEDY.search, refusals))
