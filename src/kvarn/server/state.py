"""Everything the routes of one server share, made once. Owns nothing itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvarn.observe.metrics import Metrics
    from kvarn.server.collecting import CollectionShelf
    from kvarn.server.http.traffic import Traffic
    from kvarn.server.keys import KeyRing
    from kvarn.server.lifecycle import Lifecycle
    from kvarn.server.limits import LimitBook
    from kvarn.server.pdfs import PdfReader
    from kvarn.server.priming import Primer
    from kvarn.server.requests import RequestBook
    from kvarn.server.settings import ServerConfig
    from kvarn.server.shelf import ModelShelf
    from kvarn.server.workers import Workers


@dataclass(frozen=True, slots=True)
class ServerState:
    """Found by routes as request.app.state.kvarn."""

    config: ServerConfig
    shelf: ModelShelf
    collections: CollectionShelf
    keys: KeyRing
    limits: LimitBook
    metrics: Metrics
    lifecycle: Lifecycle
    requests: RequestBook
    primer: Primer
    traffic: Traffic
    pdfs: PdfReader
    workers: Workers
