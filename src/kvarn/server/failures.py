"""Exceptions become HTTP: the only place that decides status codes. The shapes of bodies are in api/*/errors.py.

For what a client caused, the body has the exception's message. What failed on our side is logged and gets a general
message, because the exception's may name files, devices or other requests.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvarn import errors
from kvarn.server.api.anthropic import errors as anthropic
from kvarn.server.api.field_names import NO_FIELDS, GivenFields, field_of, told_of
from kvarn.server.api.ollama import errors as ollama
from kvarn.server.api.openai import errors as openai
from kvarn.server.api.responses import errors as responses
from kvarn.server.api.schema import InvalidField
from kvarn.server.models.no_room import ModelInUse
from kvarn.server.process.lifecycle import NotReady, ShuttingDown

log = logging.getLogger("kvarn.server")
OUR_FAULT = "the server failed on this request; it was logged under the request's id"
STORAGE_FAULT = "the collection cannot be read or changed now; the server's log says why"
COLLECTION_LOCKED = (
    "another process is changing this collection; send changes to that server, or wait until it has ended"
)
MAX_PARAM = 160  # characters of the name of a field
# Errors about the names in a body as it was sent: the client knows them, whether or not we do.
AS_SENT = frozenset({"unknown_field", "unsupported_parameter", "missing_field"})


class BadBody(errors.RequestError):
    """The bytes of the body are not what they should be; field: where, if that is known."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class BodyTooLarge(errors.RequestError):
    """More bytes than the server takes."""


class UnsupportedMediaType(errors.RequestError):
    """The body is of a kind or an encoding that the server does not read."""


class UnknownRequest(errors.RequestError):
    """No running request of this key has this id."""


class UnknownResponse(errors.RequestError):
    """No response with this id is stored for this key."""


class UnknownFile(errors.RequestError):
    """No file with this id is kept for this key."""


class UnknownBatch(errors.RequestError):
    """No batch with this id is kept for this key."""


class BatchesUnavailable(errors.RequestError):
    """This server has no folder for files and batches."""


class BatchesUnwritable(errors.KvarnError):
    """The folder for files and batches cannot be written, mostly because the disk is full."""


class RetrievalUnavailable(errors.RequestError):
    """This server was installed without what retrieval needs."""


class PullFailed(errors.RequestError):
    """A model could not be fetched: the network, the source, or the disk."""

    field = "model"


class NotServable(errors.RequestError):
    """A model that an admin asked for cannot be served here: its files, its memory, or the engine's options."""

    field = "model"


class NoReplica(errors.CapacityError):
    """A router has nobody to ask."""


class ReplicaLost(errors.RequestError):
    """The replica that answered is gone; the request may have been computed in part."""


class ClientGone(errors.RequestError):
    """The client closed the connection; the answer will not be read."""


@dataclass(frozen=True, slots=True)
class StatusRule:
    """The response to one class of exceptions."""

    status: int
    type: str
    code: str | None
    message: str | None = None  # instead of the exception's own


@dataclass(frozen=True, slots=True)
class Failure:
    """One exception as a client sees it."""

    status: int
    type: str
    code: str | None
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    mentions: tuple[str, ...] = ()  # names of fields in the message

    @property
    def log_fields(self) -> dict[str, str]:
        """What the access log tells of it: the code, and the field if it is one of ours, without what is below it."""
        fields = {} if self.code is None else {"error_code": self.code}
        if self.param and self.code not in ("unknown_field", "invalid_body"):  # a name of the client's may be a secret
            fields["error_field"] = self.param.partition(".")[0]
        return fields

    def renamed(self, field_name: Callable[[str], str]) -> Failure:
        """With the fields called as a dialect calls them; names that the client itself sent stay."""
        if self.code in AS_SENT:
            return self
        message = self.message
        for name in self.mentions:
            message = message.replace(name, field_name(name), 1)
        return replace(self, message=message, param=None if self.param is None else field_name(self.param))


# The rule of the nearest base class counts.
RULES: Mapping[type[BaseException], StatusRule] = {
    errors.RequestError: StatusRule(400, "invalid_request_error", "invalid_request"),
    errors.InvalidParameter: StatusRule(400, "invalid_request_error", "invalid_value"),
    errors.PromptTooLong: StatusRule(400, "invalid_request_error", "context_length_exceeded"),
    errors.TemplateError: StatusRule(400, "invalid_request_error", "template_error"),
    errors.ConstraintError: StatusRule(400, "invalid_request_error", "constraint_error"),
    errors.Cancelled: StatusRule(499, "invalid_request_error", "cancelled"),
    errors.DeadlineExceeded: StatusRule(504, "timeout_error", "deadline_exceeded"),
    BadBody: StatusRule(400, "invalid_request_error", "invalid_body"),
    BodyTooLarge: StatusRule(413, "invalid_request_error", "body_too_large"),
    UnsupportedMediaType: StatusRule(415, "invalid_request_error", "unsupported_media_type"),
    UnknownRequest: StatusRule(404, "invalid_request_error", "request_not_found"),
    UnknownResponse: StatusRule(404, "invalid_request_error", "response_not_found"),
    UnknownFile: StatusRule(404, "invalid_request_error", "file_not_found"),
    UnknownBatch: StatusRule(404, "invalid_request_error", "batch_not_found"),
    PullFailed: StatusRule(502, "api_error", "pull_failed"),
    NotServable: StatusRule(409, "invalid_request_error", "not_servable"),
    ModelInUse: StatusRule(409, "invalid_request_error", "model_in_use"),
    BatchesUnavailable: StatusRule(501, "api_error", "batches_unavailable"),
    BatchesUnwritable: StatusRule(503, "api_error", "storage_unavailable"),
    ClientGone: StatusRule(499, "invalid_request_error", "client_closed_request"),
    RetrievalUnavailable: StatusRule(501, "api_error", "retrieval_unavailable"),
    errors.RetrievalError: StatusRule(400, "invalid_request_error", "retrieval_error"),
    errors.CollectionNotFound: StatusRule(404, "invalid_request_error", "collection_not_found"),
    errors.StorageQuotaExceeded: StatusRule(403, "permission_error", "storage_quota_exceeded"),
    errors.StorageError: StatusRule(503, "api_error", "storage_unavailable", STORAGE_FAULT),
    errors.CollectionLocked: StatusRule(503, "api_error", "collection_locked", COLLECTION_LOCKED),
    errors.ModelNotFound: StatusRule(404, "invalid_request_error", "model_not_found"),
    errors.UnsupportedModel: StatusRule(400, "invalid_request_error", "unsupported_by_model"),
    errors.ModelError: StatusRule(
        503, "api_error", "model_unavailable", "the model could not be loaded; ask for another"
    ),
    errors.DoesNotFit: StatusRule(503, "api_error", "model_does_not_fit", "the model does not fit; ask for another"),
    errors.AuthError: StatusRule(401, "authentication_error", "invalid_api_key"),
    errors.CapacityError: StatusRule(429, "rate_limit_error", "overloaded"),
    errors.RateLimited: StatusRule(429, "rate_limit_error", "rate_limit_exceeded"),
    NoReplica: StatusRule(503, "api_error", "no_replica"),
    ReplicaLost: StatusRule(502, "api_error", "replica_lost"),
    errors.HelperUnavailable: StatusRule(503, "api_error", "helper_unavailable"),
    errors.LimitsUnavailable: StatusRule(503, "api_error", "limits_unavailable"),
    ShuttingDown: StatusRule(503, "api_error", "shutting_down"),
    NotReady: StatusRule(503, "api_error", "not_ready"),
    BaseException: StatusRule(500, "api_error", "internal_error", OUR_FAULT),
}
HTTP_CODES: Mapping[int, str] = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 415: "unsupported"}


def failure_of(error: BaseException, given: GivenFields = NO_FIELDS) -> Failure:
    """The response to an exception; given: the fields of the body, one of which may be at fault."""
    if isinstance(error, HTTPException):  # the router's: unknown path, wrong method
        code = HTTP_CODES.get(error.status_code)
        headers = dict(error.headers or {})
        return Failure(error.status_code, "invalid_request_error", code, str(error.detail), headers=headers)
    rule = next(RULES[kind] for kind in type(error).__mro__ if kind in RULES)
    if isinstance(error, errors.AuthError) and error.reason == "forbidden":
        rule = StatusRule(403, "permission_error", "forbidden")
    message = rule.message or errors.shortened(str(error)) or OUR_FAULT
    headers = _headers(error)
    if isinstance(error, InvalidField):
        code = error.code or rule.code
        return Failure(rule.status, rule.type, code, message, _short_name(error.field), headers, error.mentions)
    parameter = getattr(error, "field", None)
    param = field_of(parameter, given) if isinstance(parameter, str) and rule.status < 500 else None
    return Failure(rule.status, rule.type, rule.code, told_of(message, parameter, param), _short_name(param), headers)


def _short_name(field: str | None) -> str | None:
    return None if field is None else errors.shortened(field, MAX_PARAM, MAX_PARAM // 4)


def failure_body(failure: Failure, path: str) -> bytes:
    """The body in the shape that clients of a path read."""
    if anthropic.is_path(path):
        body = anthropic.error_body(failure)
    elif ollama.is_path(path):
        body = ollama.error_body(failure)
    else:
        body = openai.error_body(failure.renamed(responses.field_name) if path == responses.PATH else failure)
    return json.dumps(body, separators=(",", ":")).encode()


def failure_response(
    error: BaseException,
    path: str,
    request_id: str = "",
    log_fields: dict[str, Any] | None = None,
    given: GivenFields = NO_FIELDS,
) -> Response:
    """The whole response; what is our fault is logged, and log_fields gets what the access log tells of it."""
    failure = failure_of(error, given)
    report(error, request_id)
    if log_fields is not None:
        log_fields.update(failure.log_fields)
    return Response(failure_body(failure, path), failure.status, dict(failure.headers), "application/json")


def report(error: BaseException, request_id: str) -> None:
    """Log what is our fault."""
    is_storage = isinstance(error, errors.StorageError) and not isinstance(error, errors.CollectionLocked)
    if failure_of(error).status == 500 or is_storage:
        log.error("request %s failed: %s", request_id, type(error).__name__, exc_info=error)


def _headers(error: BaseException) -> dict[str, str]:
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, errors.CapacityError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, errors.AuthError) and error.reason != "forbidden":
        headers["www-authenticate"] = "Bearer"
    return headers
