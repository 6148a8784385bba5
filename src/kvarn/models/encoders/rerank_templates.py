"""How rerankers that are language models read a query and a document, and by which words they judge.

GGUF files carry the template themselves; folders leave it to the reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvarn.models.spec import Encoder, ModelSpec


@dataclass(frozen=True, slots=True)
class RerankTemplate:
    """A prompt with {query} and {document} in it; the first token of the answer is one of the two words."""

    text: str
    yes: str = "yes"
    no: str = "no"


_QWEN3: Final = RerankTemplate(
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
TEMPLATES: Final[Mapping[str, RerankTemplate]] = {"qwen3": _QWEN3, "qwen3moe": _QWEN3, "qwen3_moe": _QWEN3}


def rerank_template(spec: ModelSpec) -> RerankTemplate | None:
    """The template of a model that scores pairs, or that is called a reranker; None: it is asked as any other model."""
    is_scoring = isinstance(spec.generation, Encoder) and spec.generation.classifier is not None
    if not is_scoring and "reranker" not in spec.name.lower():
        return None
    return TEMPLATES.get(spec.architecture)


def filled(text: str, query: str, document: str) -> tuple[str, list[int]]:
    """The prompt, and the offsets of the characters that are a user's."""
    written = ""
    plain: list[int] = []
    while (at := min((i for i in (text.find("{query}"), text.find("{document}")) if i >= 0), default=-1)) >= 0:
        is_query = text.startswith("{query}", at)
        own = query if is_query else document
        written += text[:at]
        plain += range(len(written), len(written) + len(own))
        written += own
        text = text[at + len("{query}" if is_query else "{document}") :]
    return written + text, plain
