"""Answers of Ollama's API, as the OpenAPI document describes them."""

from __future__ import annotations

from typing import Any

from kvarn.server.api.schema import Answer


class Timed(Answer):
    """How long it took, in nanoseconds, in the last line only."""

    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChatAnswer(Timed):
    """A line of the answer, or the whole of it."""

    model: str
    created_at: str
    message: dict[str, Any]
    done: bool
    done_reason: str | None = None


class GenerateAnswer(Timed):
    """A line of the answer, or the whole of it."""

    model: str
    created_at: str
    response: str
    done: bool
    done_reason: str | None = None


class EmbedAnswer(Answer):
    """One vector for each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OlderEmbeddingsAnswer(Answer):
    """The vector."""

    embedding: list[float]


class ModelDetails(Answer):
    """What a model file is."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelTag(Answer):
    """One model of this server; digest is empty before a local file's first load."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ModelTags(Answer):
    """The models of this server."""

    models: list[ModelTag]


class ShownModel(Answer):
    """One model in detail; template is Jinja, as the file has it."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Answer):
    """The version of Ollama whose API this is."""

    version: str
