"""Which sources support which sentences of an answer: by words, rare ones above all, and by meaning.

Nothing that the model says of its sources is believed: small ones write [1] behind anything. Knows an embedder and
document frequencies; knows no collection and no model that chats.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvarn.citations.types import CitedPassage, SentenceSupport
from kvarn.retrieval.search.sentences import sentence_spans, without_markers
from kvarn.retrieval.text_analysis import DEFAULT_LANGUAGE, content_terms, rarity, terms
from kvarn.retrieval.types import Hit

if TYPE_CHECKING:
    from kvarn.retrieval.embedder import Embedder
    from kvarn.retrieval.retriever import Retriever

Features = tuple[float, float, float]
Pair = tuple[str, str]  # neighbouring terms, stop words left out
MAX_CLAIMS = 64  # of an answer; what comes after them is not looked at
MAX_SENTENCES = 64  # of a source
SHORT_TERMS = 4  # a sentence of fewer terms, such as "16.", is read with the question that it answers


@dataclass(frozen=True, slots=True)
class SupportModel:
    """How likely a passage supports a sentence: a logistic function, fitted on answers judged by hand (ADR 40)."""

    constant: float = -6.4
    words: float = 2.4  # times the share of the sentence's words, by rarity, that the passage has
    pairs: float = 2.6  # times the share of its pairs of neighbouring words
    cosine: float = 4.0  # times the cosine of sentence and passage
    least: float = 0.4  # from here on it supports the sentence

    def score(self, features: Features) -> float:
        """features: in the order of the weights."""
        weights = (self.words, self.pairs, self.cosine)
        logit = self.constant + sum(w * x for w, x in zip(weights, features, strict=True))
        return 1.0 / (1.0 + math.exp(-logit))


@dataclass(frozen=True, slots=True)
class AnswerSentence:
    """A sentence of an answer that has a word which is not a stop word."""

    span: tuple[int, int]  # characters of the answer
    text: str  # with the question, if the sentence is short
    terms: frozenset[str]  # of both
    own_terms: frozenset[str]
    pairs: frozenset[Pair]  # of its own


@dataclass(frozen=True, slots=True)
class Passage:
    """One or two neighbouring sentences of a source, with the terms of the headings above them."""

    span: tuple[int, int]  # characters of the chunk
    text: str
    terms: frozenset[str]
    pairs: frozenset[Pair]


@dataclass(frozen=True, slots=True)
class SourceAttributor:
    """Compares an answer with its sources. Made before the answer, so that the collection may be closed meanwhile."""

    question: str
    hits: tuple[Hit, ...]  # in the order of their numbers, from 1 on
    rarity: Mapping[str, float]  # of the terms of the sources
    max_rarity: float  # of all other terms
    language: str
    embedder: Embedder
    model: SupportModel = SupportModel()

    def attribute(self, answer: str) -> tuple[SentenceSupport, ...]:
        """Every sentence of an answer that says something, in order."""
        return tuple(self._support(*one) for one in self.evidence(answer))

    def evidence(self, answer: str) -> list[tuple[AnswerSentence, list[Features], list[Passage]]]:
        """What speaks for it that each source supports each sentence, and the passage that does so best."""
        claims = self.claims(answer)
        if not claims:
            return []
        sources = [self._passages(hit) for hit in self.hits]
        best = [[self._best(claim, passages) for passages in sources] for claim in claims]
        cosines = self._cosines(claims, best)
        return [
            (claim, [self._features(claim, *one) for one in zip(found, near, strict=True)], found)
            for claim, found, near in zip(claims, best, cosines, strict=True)
        ]

    def claims(self, answer: str) -> list[AnswerSentence]:
        """The sentences of an answer that say something."""
        asked = frozenset(content_terms(self.question, self.language))
        claims: list[AnswerSentence] = []
        for span in sentence_spans(answer):
            if len(claims) == MAX_CLAIMS:
                break
            text = without_markers(answer[slice(*span)])
            found = content_terms(text, self.language)
            own, pairs = frozenset(found), frozenset(itertools.pairwise(found))
            if not own or text.endswith(":"):  # what announces a list says nothing by itself
                continue
            if len(own) < SHORT_TERMS:
                claims.append(AnswerSentence(span, f"{self.question} {text}", own | asked, own, pairs))
            else:
                claims.append(AnswerSentence(span, text, own, own, pairs))
        return claims

    def _passages(self, hit: Hit) -> list[Passage]:
        """Every sentence of a source, and every two neighbours."""
        above = frozenset(terms(f"{hit.source} {hit.heading}", self.language))
        spans = sentence_spans(hit.text)[:MAX_SENTENCES] or [(0, len(hit.text))]
        spans += [(first[0], second[1]) for first, second in itertools.pairwise(spans)]
        return [self._passage(span, hit.text[slice(*span)], above) for span in spans]

    def _passage(self, span: tuple[int, int], text: str, above: frozenset[str]) -> Passage:
        pairs = frozenset(itertools.pairwise(content_terms(text, self.language)))
        return Passage(span, text, above.union(terms(text, self.language)), pairs)

    def _best(self, claim: AnswerSentence, passages: Sequence[Passage]) -> Passage:
        """The passage that has most of a sentence's words; of equal ones the shortest."""
        return max(passages, key=lambda one: (self._share(claim.terms, one.terms), -len(one.text)))

    def _share(self, wanted: frozenset[str], found: frozenset[str]) -> float:
        """Which part of some terms is among others, by rarity."""
        total = sum(map(self._rarity, wanted))
        return sum(self._rarity(term) for term in wanted & found) / total if total else 0.0

    def _rarity(self, term: str) -> float:
        return self.rarity.get(term, self.max_rarity)

    def _cosines(self, claims: Sequence[AnswerSentence], best: Sequence[Sequence[Passage]]) -> list[list[float]]:
        """Of every sentence with the best passage of every source; all texts are embedded together."""
        texts = [claim.text for claim in claims] + [one.text for passages in best for one in passages]
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        vectors = self.embedder.embed([fitting(self.embedder, text) for text in places])
        return [
            [float(vectors[places[claim.text]] @ vectors[places[one.text]]) for one in passages]
            for claim, passages in zip(claims, best, strict=True)
        ]

    def _support(self, claim: AnswerSentence, features: Sequence[Features], best: Sequence[Passage]) -> SentenceSupport:
        passages = []
        for number, (hit, one, values) in enumerate(zip(self.hits, best, features, strict=True), 1):
            span = (hit.span[0] + one.span[0], hit.span[0] + one.span[1])
            passages.append(CitedPassage(number, span, self.model.score(values)))
        passages.sort(key=lambda passage: (-passage.score, passage.number))
        enough = tuple(passage for passage in passages if passage.score >= self.model.least)
        return SentenceSupport(claim.span, passages[0].score, enough)

    def _features(self, claim: AnswerSentence, passage: Passage, cosine: float) -> Features:
        """What the model weighs, in its order."""
        own = self._share(claim.own_terms, passage.terms)
        pairs = len(claim.pairs & passage.pairs) / len(claim.pairs) if claim.pairs else own
        return self._share(claim.terms, passage.terms), pairs, cosine


def source_attributor(index: Retriever, question: str, hits: Sequence[Hit], embedder: Embedder) -> SourceAttributor:
    """What compares answers with these hits, with what the collection knows of their words."""
    language = index.store.meta("language", DEFAULT_LANGUAGE)
    known = {term for hit in hits for term in terms(f"{hit.source} {hit.heading} {hit.text}", language)}
    frequencies, num_chunks = index.document_frequencies(sorted(known)), index.num_chunks
    rarities = {term: rarity(frequency, num_chunks) for term, frequency in frequencies.items()}
    unknown = rarity(0, num_chunks) if rarities else 1.0
    return SourceAttributor(question, tuple(hits), rarities, unknown, language, embedder)


def fitting(embedder: Embedder, text: str) -> str:
    """The beginning of a text that the embedding model can read."""
    while (num_tokens := embedder.count(text)) > embedder.max_tokens:
        text = text[: len(text) * embedder.max_tokens // (num_tokens + 1)]
    return text
