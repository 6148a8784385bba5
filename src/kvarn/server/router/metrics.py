"""What a router counts, in the text format of Prometheus. Names of replicas are those it was started with."""

from __future__ import annotations

from collections.abc import Sequence

from kvarn.observe.exposition import make_registry, render
from kvarn.observe.histogram import SECONDS
from kvarn.observe.metric_definitions import MetricSpec
from kvarn.observe.metric_store import MetricStore
from kvarn.routing.choice import ReplicaChoice, bits
from kvarn.routing.fleet import Fleet

REPLICA = ("replica",)
RETRY_REASONS = ("unreachable", "lost", "refused")
CHOOSING_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2)


def _of_replica(name: str, text: str) -> MetricSpec:
    return MetricSpec(f"router_replica_{name}", "gauge", text, labels=REPLICA, in_vllm=False)


ROUTER_METRICS = (
    MetricSpec("router_requests", "counter", "Requests handed to a replica, retries included.", REPLICA, in_vllm=False),
    MetricSpec(
        "router_retries",
        "counter",
        "Requests that went to another replica before their first byte.",
        ("reason",),
        RETRY_REASONS,
        in_vllm=False,
    ),
    MetricSpec("router_streams_lost", "counter", "Answers that broke off with their replica.", REPLICA, in_vllm=False),
    MetricSpec("router_no_replica", "counter", "Requests refused because nobody could be asked.", (), in_vllm=False),
    MetricSpec(
        "router_prefix_tokens", "counter", "Prompt tokens that lay at the chosen replica.", REPLICA, in_vllm=False
    ),
    MetricSpec(
        "router_prefix_tokens_passed",
        "counter",
        "Prompt tokens that lay at another replica, which was too busy.",
        (),
        in_vllm=False,
    ),
    MetricSpec(
        "router_choice_seconds",
        "histogram",
        "Time to find a request's prefix and choose a replica.",
        (),
        bounds=CHOOSING_S,
        in_vllm=False,
    ),
    MetricSpec(
        "router_first_byte_seconds",
        "histogram",
        "Time until a replica's first byte.",
        REPLICA,
        bounds=SECONDS,
        in_vllm=False,
    ),
    _of_replica("usable", "1 if the replica may be asked."),
    _of_replica("open_requests", "Requests of this router that it answers."),
    _of_replica("load_tokens", "Tokens it has to compute, the larger of what it says and what it was sent."),
    MetricSpec("router_index_blocks", "gauge", "Different blocks that replicas hold.", (), in_vllm=False),
    MetricSpec("router_index_texts", "gauge", "Texts that name one of them.", (), in_vllm=False),
)


class RouterMetrics:
    """What one fleet counts; several of one process count in one store."""

    def __init__(self, names: Sequence[str], beside: RouterMetrics | None = None) -> None:
        self._store: MetricStore = MetricStore(ROUTER_METRICS) if beside is None else beside._store
        self._store.start_at_zero({"replica": names})
        self._registry = make_registry(self._store, with_vllm=False)
        self._names = names

    def chose(self, choice: ReplicaChoice, seconds: float) -> None:
        """A request was handed to a replica."""
        name = self._names[choice.replica]
        self._store.increment("router_requests", name)
        self._store.increment("router_prefix_tokens", name, by=choice.num_cached)
        self._store.increment("router_prefix_tokens_passed", by=max(0, choice.best_cached - choice.num_cached))
        self._store.histogram("router_choice_seconds").observe(seconds)

    def answered(self, replica: int, seconds: float) -> None:
        self._store.histogram("router_first_byte_seconds", self._names[replica]).observe(seconds)

    def retried(self, reason: str) -> None:
        self._store.increment("router_retries", reason)

    def lost(self, replica: int) -> None:
        self._store.increment("router_streams_lost", self._names[replica])

    def refused(self) -> None:
        self._store.increment("router_no_replica")

    def render(self, *fleets: Fleet) -> bytes:
        """The text of one scrape."""
        for fleet in fleets:
            usable = set(bits(fleet.usable))
            for number, one in enumerate(fleet.replicas):
                self._store.set("router_replica_usable", one.name, to=float(number in usable))
                self._store.set("router_replica_open_requests", one.name, to=one.num_open)
                self._store.set("router_replica_load_tokens", one.name, to=fleet.load_of(number))
        self._store.set("router_index_blocks", to=sum(fleet.index.num_blocks for fleet in fleets))
        self._store.set("router_index_texts", to=sum(fleet.index.num_texts for fleet in fleets))
        return render(self._registry)
