"""Bodies and answers of /v1/files and /v1/batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvarn.server.api.schema import Answer, Body

Metadata = Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)]


class BatchBody(Body):
    """Which file to answer, and how."""

    input_file_id: str = Field(max_length=128)
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class FileAnswer(Answer):
    """A file that is kept."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str


class DeletedFile(Answer):
    """A file that is no longer kept."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool


class FileList(Answer):
    """Some files of a key."""

    object: Literal["list"] = "list"
    data: list[FileAnswer]
    has_more: bool


class BatchObject(Answer):
    """A batch and how far it is."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    created_at: int
    request_counts: dict[str, int]
    output_file_id: str | None
    error_file_id: str | None
    errors: dict[str, Any] | None


class BatchList(Answer):
    """Some batches of a key."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    has_more: bool
