"""The replicas of a cluster as a router knows them: who may be asked, how busy each is, and what it holds.

Load is the larger of what a replica says and what this router sent it and is not answered: one that says nothing, or
less than is true, gets no more than its share. Times are this process's own. Knows no sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvarn.routing.choice import DECODE_TOKENS, POLICIES, ReplicaChoice, RoutingQuestion
from kvarn.routing.feed import FeedFrame, ReplicaIdentity, ReplicaLoad
from kvarn.routing.holders import Holders
from kvarn.routing.index import NO_MATCH, FleetIndex
from kvarn.routing.text_prefix import BYTES_PER_TOKEN, TextPrefix

SILENT_S = 5.0  # a replica that told nothing for so long is not asked
IDLE = ReplicaLoad()
LOOK_S = 0.1  # between two looks at who has fallen silent
FAILED_S = 1.0  # nor one whose connection failed, until it speaks again or so much later


@dataclass(slots=True)
class ReplicaState:
    """One replica. phase: its own, or why it is not asked: connecting, refused, silent."""

    name: str
    address: str | None  # None: nobody is here
    phase: str = "connecting"
    reason: str = ""  # why it is refused, for operators
    identity: ReplicaIdentity | None = None
    load: ReplicaLoad = IDLE
    heard_at: float = 0.0
    failed_at: float | None = None
    num_open: int = 0  # requests of this router
    open_tokens: float = 0.0  # of their prompts, and of answers that run


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request on its way through a replica."""

    choice: ReplicaChoice
    cost: float  # tokens that it counts as now
    is_answered: bool = field(default=False)


class Fleet:
    """All replicas; numbers are places in the list they were given in."""

    def __init__(
        self, names: Sequence[str], policy: str = "prefix", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.replicas = [ReplicaState(name, name) for name in names]
        self.index = FleetIndex()
        self.names = Holders()  # of adapters and models that not all may have
        self.tags = Holders()  # that ids of requests begin with
        self._choose = POLICIES[policy]
        self._clock = clock
        self._turn = 0
        self._usable, self._looked_at, self._is_changed = 0, 0.0, True
        self._loads: list[float] = [0.0] * len(names)

    @property
    def usable(self) -> int:
        """Replicas that may be asked, as bits; looked through when something changed, and now and then."""
        now, usable = self._clock(), 0
        if not self._is_changed and now - self._looked_at < LOOK_S:
            return self._usable
        for number, one in enumerate(self.replicas):
            has_failed = one.failed_at is not None and now - one.failed_at < FAILED_S
            if one.phase == "ready" and not has_failed and now - one.heard_at < SILENT_S:
                usable |= 1 << number
        self._usable, self._looked_at, self._is_changed = usable, now, False
        return usable

    def load_of(self, number: int) -> float:
        """Tokens that a replica has to compute."""
        return self._loads[number]

    def greet(self, number: int, identity: ReplicaIdentity) -> bool:
        """A replica has told what it is; False: it differs from those that are asked already."""
        one = self.replicas[number]
        for other in self.replicas:
            if other is one or other.identity is None:
                continue
            if found := other.identity.differences(identity):
                one.phase, one.identity = "refused", None
                one.reason = f"it differs from {other.name}: {'; '.join(found)}"
                return False
        one.identity, one.reason, one.failed_at, one.heard_at = identity, "", None, self._clock()
        self.tags.set(number, (identity.tag,) if identity.tag else ())
        return True

    def hear(self, number: int, frame: FeedFrame) -> None:
        """Take over what a replica told."""
        one = self.replicas[number]
        self._is_changed |= one.phase != frame.phase or one.failed_at is not None
        one.phase, one.load, one.heard_at, one.failed_at = frame.phase, frame.load, self._clock(), None
        if frame.is_all:
            self.index.reset(number)
        if frame.names is not None:
            self.names.set(number, frame.names)
        assert not isinstance(frame.changes, bytes)
        self.index.apply(number, frame.changes)
        self._count(number)

    def place(self, number: int, address: str | None) -> None:
        """Who has this place now: keys have their homes by addresses, so that all routers choose the same."""
        self.lose(number, "connecting", "")
        self.replicas[number].address = address

    def lose(self, number: int, phase: str, reason: str) -> None:
        """A replica tells nothing any more: what it held is unknown."""
        self._is_changed = True
        one = self.replicas[number]
        one.phase, one.reason, one.identity, one.load = phase, reason, None, ReplicaLoad()
        self.index.reset(number)
        self.names.set(number, ())
        self.tags.set(number, ())
        self._count(number)

    def fail(self, number: int) -> None:
        """A connection to it could not be made, or broke."""
        self._is_changed = True
        self.replicas[number].failed_at = self._clock()

    def route(self, prefix: TextPrefix | None, usable: int, num_bytes: int = 0) -> tuple[int, RoutedRequest]:
        """Choose a replica for a request and count it there; usable: not 0."""
        match = NO_MATCH if prefix is None else self.index.match(prefix.texts, usable)
        num_tokens = num_bytes / BYTES_PER_TOKEN
        if prefix is not None:
            num_tokens = prefix.num_tokens(match.text, match.num_tokens)
        choice = self._choose(RoutingQuestion(match, num_tokens, self._loads, usable, self._turn))
        self._turn += 1
        routed = RoutedRequest(choice, max(0.0, num_tokens - choice.num_cached) + DECODE_TOKENS)
        one = self.replicas[choice.replica]
        one.num_open += 1
        one.open_tokens += routed.cost
        self._count(choice.replica)
        return choice.replica, routed

    def answer(self, routed: RoutedRequest) -> None:
        """The first byte of an answer has come: its prompt is computed."""
        if not routed.is_answered:
            routed.is_answered = True
            self._charge(routed, DECODE_TOKENS)

    def end(self, routed: RoutedRequest) -> None:
        """A request has ended, or goes elsewhere."""
        self._charge(routed, 0.0)
        self.replicas[routed.choice.replica].num_open -= 1

    def _charge(self, routed: RoutedRequest, cost: float) -> None:
        self.replicas[routed.choice.replica].open_tokens += cost - routed.cost
        routed.cost = cost
        self._count(routed.choice.replica)

    def _count(self, number: int) -> None:
        one = self.replicas[number]
        told = one.load.prompt_tokens + DECODE_TOKENS * (one.load.running + one.load.waiting)
        self._loads[number] = max(told, one.open_tokens)
