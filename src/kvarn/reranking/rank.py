"""Reranking by a model that reads query and document together: a cross-encoder, or a chat model's Yes and No.

A document too long for the cross-encoder has the score of its best part. Knows prompts and scores; knows no index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvarn.checks import check_parameter, is_iterable, short
from kvarn.engine.handle import RequestHandle
from kvarn.errors import InvalidParameter, UnsupportedModel
from kvarn.models.encoders.rerank_templates import rerank_template
from kvarn.models.spec import Encoder, ModelSpec
from kvarn.prompts import pair_ids, rerank_ids
from kvarn.tokenizer.text_units import split_text, weighed
from kvarn.tokenizer.tokenizer import Tokenizer
from kvarn.types import Completion, SamplingParams
from kvarn.vectors import Float32

MAX_QUERY_SHARE = 0.5  # of the cross-encoder's context
MAX_LABELS = 2  # no, yes; of more, nothing tells which one means that a document answers a query
BIAS = 100.0  # makes one token certain, so that its logprob is reported; logprobs are taken before the bias
TASK = "Judge whether the document answers the query. Answer Yes or No."


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document that was ranked: its place among those given, how well it answers the query (0 to 1), itself."""

    index: int
    score: float
    text: str


class Reranks(Protocol):
    """What reranking needs of a kvarn.LLM."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def context(self) -> int: ...

    def classify(self, pairs: Sequence[tuple[str, str]], *, priority: int = 0) -> Float32: ...

    def submit(self, prompt: list[int], params: SamplingParams | None = None, *, tenant: str = "") -> RequestHandle: ...


class RerankBatch(Protocol):
    """Prompts of documents, ready to be scored by a model."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts together."""

    def scores(self, tenant: str = "", priority: int = 0, /) -> Float32:
        """How well each document answers the query, 0 to 1. The tenant salts the prefix cache."""


def prepare(llm: Reranks, query: str, documents: Sequence[str]) -> RerankBatch:
    """Make the prompts; nothing is computed yet."""
    generation = llm.spec.generation
    if not isinstance(generation, Encoder):
        return _chat_batch(llm, query, documents)
    if generation.classifier is None:
        raise UnsupportedModel(
            f"{llm.spec.name!r} embeds texts one by one; rerank needs a cross-encoder or a model that chats"
        )
    if generation.classifier.labels > MAX_LABELS:
        raise UnsupportedModel(
            f"{llm.spec.name!r} sorts pairs into {generation.classifier.labels} classes, none of which is known to "
            "say how well the second text answers the first; rerank needs one label or two"
        )
    num_query = len(pair_ids(llm.tokenizer, (query, ""), llm.spec))
    return _CrossEncoderBatch(llm, query, [_parts(llm, num_query, document) for document in documents])


def _chat_batch(llm: Reranks, query: str, documents: Sequence[str]) -> ChatBatch:
    """A model made for it is asked as it was trained, any other one in its chat."""
    template = rerank_template(llm.spec)
    if template is not None:
        prompts = [rerank_ids(llm.tokenizer, (query, document), llm.spec) for document in documents]
        return ChatBatch(llm, prompts, (template.yes, template.no))
    return ChatBatch(llm, [llm.tokenizer.encode_chat(_messages(query, document)) for document in documents])


def ranked(llm: Reranks, query: object, documents: object, top_n: int | None = None) -> list[RankedDocument]:
    """The documents that answer a query best, best first; among equal scores the earlier one first."""
    if not isinstance(query, str) or not query:
        raise InvalidParameter(f"query is {short(query)}; give a text", field="query")
    texts = _texts(documents)
    check_parameter.integer("top_n", top_n, 1, 2**31, optional=True)
    scores = rerank(llm, query, texts)
    order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[:top_n]
    return [RankedDocument(index, float(scores[index]), texts[index]) for index in order]


def _texts(documents: object) -> list[str]:
    texts: list[Any] = list(documents) if is_iterable(documents) and not isinstance(documents, str) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidParameter(
            f"documents are {short(documents)}; give a list of texts, none of them empty", field="documents"
        )
    return texts


def rerank(llm: Reranks, query: str, documents: Sequence[str], tenant: str = "") -> Float32:
    """How well each document answers a query, 0 to 1. The tenant salts the prefix cache."""
    return prepare(llm, query, documents).scores(tenant) if documents else np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class _CrossEncoderBatch:
    """Pairs of the query and a part of a document."""

    llm: Reranks
    query: str
    parts: Sequence[Sequence[str]]  # of each document

    @property
    def num_tokens(self) -> int:
        encode = self.llm.tokenizer.encode
        num_fixed = len(pair_ids(self.llm.tokenizer, (self.query, ""), self.llm.spec))  # [CLS] query [SEP] part [SEP]
        texts = [part for one in self.parts for part in one]
        return sum(num_fixed + len(encode(text, add_special=False)) for text in texts)

    def scores(self, _tenant: str = "", priority: int = 0, /) -> Float32:
        logits = self.llm.classify([(self.query, part) for one in self.parts for part in one], priority=priority)
        starts = np.cumsum([0, *map(len, self.parts)])[:-1]
        generation = self.llm.spec.generation
        assert isinstance(generation, Encoder), "it has a classifier"
        assert generation.classifier is not None, "it has a classifier"
        return np.maximum.reduceat(_relevance(logits, generation.classifier.relevant), starts).astype(np.float32)


def _relevance(logits: Float32, relevant: int) -> Float32:
    """One label: its sigmoid. Several: the softmax of the one that says so."""
    wide = logits.astype(np.float64)
    if wide.shape[1] == 1:
        return np.asarray(1.0 / (1.0 + np.exp(-wide[:, 0])), np.float32)
    weights = np.exp(wide - wide.max(axis=1, keepdims=True))
    return np.asarray(weights[:, relevant] / weights.sum(axis=1), np.float32)


def _parts(llm: Reranks, num_query: int, document: str) -> list[str]:
    """A document in parts that fit into the context together with a query and all else, of so many tokens."""
    encode = llm.tokenizer.encode
    if num_query > MAX_QUERY_SHARE * llm.context:
        raise InvalidParameter(
            f"the query has {num_query:,} tokens, at most half of the model's context of {llm.context:,} is allowed; "
            "shorten it",
            field="query",
        )
    room = llm.context - num_query - 1  # a word at the border may be cut otherwise
    count = weighed(lambda text: len(encode(text, add_special=False)))
    spans = split_text(document, (0, len(document)), room, 0, count)
    return [document[start:end] for start, end in spans] or [document]


@dataclass(frozen=True, slots=True)
class ChatBatch:
    """One prompt per document, for a model that chats."""

    llm: Reranks
    prompts: Sequence[list[int]]
    words: tuple[str, str] = ("Yes", "No")

    @property
    def num_tokens(self) -> int:
        """Each prompt counts once: it is sent for Yes and for No, and the second is in the prefix cache."""
        return sum(map(len, self.prompts))

    def scores(self, tenant: str = "", priority: int = 0, /) -> Float32:
        """P(Yes) / (P(Yes) + P(No)) of the first token of an answer."""
        yes, no = (_logprobs(self.llm, self.prompts, word, tenant, priority) for word in self.words)
        return np.array([1.0 / (1.0 + math.exp(min(n - y, 700.0))) for y, n in zip(yes, no, strict=True)], np.float32)


def _logprobs(llm: Reranks, prompts: Sequence[list[int]], word: str, tenant: str, priority: int) -> list[float]:
    token_id = llm.tokenizer.encode(word, add_special=False)[0]
    params = SamplingParams(max_tokens=1, temperature=0.0, logit_bias={token_id: BIAS}, logprobs=0, priority=priority)
    handles = [llm.submit(prompt, params, tenant=tenant) for prompt in prompts]
    return [_logprob_of(handle.result(), token_id) for handle in handles]


def _logprob_of(completion: Completion, token_id: int) -> float:
    assert completion.logprobs is not None
    first = completion.logprobs[0]
    return first.logprob if first.token_id == token_id else -math.inf


def _messages(query: str, document: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": TASK},
        {"role": "user", "content": f"Document: {document}\n\nQuery: {query}"},
    ]
