"""Answers of /v1/models: each entry has the fields of OpenAI's list and of Anthropic's."""

from __future__ import annotations

from typing import Literal

from kvarn.server.schema.common import Answer


class ModelCard(Answer):
    """One model of this server."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    created: int
    created_at: str
    owned_by: str = "kvarn"
    display_name: str
    kind: Literal["generate", "embed", "rerank"]
    max_model_len: int
    digest: str | None  # sha256 of the weights; null before the first load of a local file
    is_loaded: bool


class ModelList(Answer):
    """Every model of this server, loaded or not."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False
