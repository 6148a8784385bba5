"""What is remembered of each tenant from answer to answer: how often its drafts were right, and its answers themselves.

Never shared: what one tenant was told speeds up nobody else, which would tell them that it was said.
"""

from __future__ import annotations

from collections import OrderedDict

from kvarn.decoding.speculation.acceptance import AcceptanceRates
from kvarn.decoding.speculation.suffix_index import LONG, SEPARATOR, SuffixIndex
from kvarn.request import Request

MAX_TENANTS = 1024
MAX_TENANT_TOKENS = 1 << 16  # of answers; 1.8 MB
MAX_BYTES = 32 << 20  # of all tenants


class TenantTexts:
    """Of one tenant."""

    def __init__(self, *, keeps_answers: bool) -> None:
        self.rates = AcceptanceRates()
        self.answers = SuffixIndex(max_tokens=MAX_TENANT_TOKENS) if keeps_answers else None

    @property
    def num_bytes(self) -> int:
        return 0 if self.answers is None else self.answers.num_bytes

    def add(self, request: Request) -> None:
        """Remember an answer, and the end of its prompt, after which the next one may begin alike."""
        if self.answers is None or request.num_output == 0:
            return
        start = max(0, request.num_prompt - LONG)
        for token_id in (SEPARATOR, *request.token_ids[start:][-MAX_TENANT_TOKENS // 2 :]):
            self.answers.append(token_id)


class TenantRegistry:
    """All tenants, the least recently used first to be forgotten."""

    def __init__(self, *, keeps_answers: bool, max_bytes: int = MAX_BYTES) -> None:
        self._keeps_answers = keeps_answers
        self._max_bytes = max_bytes
        self._tenants: OrderedDict[str, TenantTexts] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return sum(texts.num_bytes for texts in self._tenants.values())

    def of(self, tenant: str) -> TenantTexts:
        texts = self._tenants.setdefault(tenant, TenantTexts(keeps_answers=self._keeps_answers))
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return texts

    def add(self, request: Request) -> None:
        """Remember an answer for its tenant."""
        self.of(request.tenant).add(request)
        while self.num_bytes > self._max_bytes and len(self._tenants) > 1:
            self._tenants.popitem(last=False)
