"""How much of the current request has arrived, and whether that is too much. Knows counts, never bytes."""

from __future__ import annotations

from kvarn.server.http import refusals
from kvarn.server.http.limits import CHUNK_ALLOWANCE, CHUNK_OVERHEAD, MAX_URL_BYTES, ConnectionLimits
from kvarn.server.http.refusals import Refused


class RequestSize:
    """Counts everything that arrives; raises Refused when it is too much."""

    __slots__ = (
        "_limits",
        "_num_body",
        "_num_head",
        "_num_headers",
        "_num_in_headers",
        "_num_url",
        "_num_wire",
        "in_body",
    )

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self.in_body = False
        self._num_head = 0  # bytes of a head that is not complete; at least 1 once it has begun
        self._num_url = 0
        self._num_headers = 0
        self._num_in_headers = 0
        self._num_wire = 0  # of the body, with what chunks add
        self._num_body = 0

    @property
    def has_begun(self) -> bool:
        """Whether a part of a head has arrived."""
        return self._num_head > 0

    def add_data(self, num_bytes: int) -> None:
        if self.in_body:
            self._num_wire += num_bytes
        else:
            self._num_head += num_bytes

    def begin_head(self) -> None:
        self._num_head = max(1, self._num_head)
        self._num_url = self._num_headers = self._num_in_headers = 0

    def add_url(self, num_bytes: int) -> None:
        self._num_url += num_bytes
        if self._num_url > MAX_URL_BYTES:
            raise Refused(refusals.long_url(MAX_URL_BYTES))

    def add_header(self, num_bytes: int) -> None:
        self._num_headers += 1
        self._num_in_headers += num_bytes + len(": \r\n")
        if self._num_headers > self._limits.max_headers:
            raise Refused(refusals.many_headers(self._limits.max_headers))
        if self._num_in_headers > self._limits.max_header_bytes:
            raise Refused(refusals.large_head(self._limits.max_header_bytes))

    def end_head(self) -> None:
        self.in_body = True
        self._num_head = self._num_wire = self._num_body = 0

    def add_body(self, num_bytes: int) -> None:
        self._num_body += num_bytes
        if self._num_body > self._limits.max_body_bytes:
            raise Refused(refusals.large_body(self._limits.max_body_bytes))

    def end_body(self) -> None:
        self.in_body = False

    def check(self) -> None:
        """After each piece of data: the parser reports whole headers only, and never the extensions of chunks."""
        if self._num_head - self._num_url > self._limits.max_header_bytes + MAX_URL_BYTES:
            raise Refused(refusals.large_head(self._limits.max_header_bytes))
        if self.in_body and self._num_wire > CHUNK_OVERHEAD * self._num_body + CHUNK_ALLOWANCE:
            raise Refused(refusals.MALFORMED_BODY)
