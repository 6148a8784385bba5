"""The index of a router against the caches of replicas, and which replica is chosen."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from kvarn.kv.cache import KVCache
from kvarn.kv.journal import PrefixJournal
from kvarn.routing.changes import NAMED, STORED, PrefixChange
from kvarn.routing.choice import AFFINITY
from kvarn.routing.cluster_key import ClusterKey
from kvarn.routing.feed import FeedError, FeedFrame, FeedReader, FeedWriter, ReplicaIdentity, ReplicaLoad
from kvarn.routing.fleet import Fleet
from kvarn.routing.index import FleetIndex
from kvarn.routing.text_prefix import MAX_SHARE, TextHasher, read_marks, write_marks

KEY = ClusterKey(b"k" * 32)
IDENTITY = ReplicaIdentity("1", {"m": {"digest": "aa", "block_size": 4}})
BLOCK = 4


class Replica:
    """A real cache with a journal, told to a router line by line over a wire that loses some."""

    def __init__(self, number: int, fleet: Fleet) -> None:
        self.number, self.fleet = number, fleet
        self.kv = KVCache(48, BLOCK, hash_key=KEY.derive("blocks"))
        self.kv.journal = PrefixJournal()
        self.live: list[str] = []
        self.num_made = self.num_resyncs = 0
        self.connect()

    def connect(self) -> None:
        """A new conversation: everything is told anew."""
        self.num_resyncs += 1
        self.reader = FeedReader(KEY)
        writer = FeedWriter.answering(KEY, self.reader.proof)
        assert writer is not None
        self.writer = writer
        assert self.fleet.greet(self.number, self.reader.hello(writer.hello(IDENTITY)))
        assert self.kv.journal is not None
        self.kv.journal.take()
        self.tell(FeedFrame("ready", changes=tuple(self.kv.journal.everything()), is_all=True))

    def tell(self, frame: FeedFrame, *, is_lost: bool = False) -> None:
        line = self.writer.frame(frame)
        if is_lost:
            return
        try:
            self.fleet.hear(self.number, self.reader.frame(line))
        except FeedError:
            self.connect()

    def report(self, *, is_lost: bool = False) -> None:
        assert self.kv.journal is not None
        is_all, changes = self.kv.journal.take()
        self.tell(FeedFrame("ready", changes=tuple(changes), is_all=is_all), is_lost=is_lost)

    def step(self, rng: random.Random) -> None:
        """Insert a prompt, or end a sequence; the small pool evicts what is oldest."""
        if self.live and (rng.random() < 0.45 or len(self.live) > 4):
            self.kv.release(self.live.pop(rng.randrange(len(self.live))), unpublish=rng.random() < 0.1)
            return
        tokens = [rng.randrange(3)] * 8 + [rng.randrange(2) for _ in range(rng.randrange(24))]
        name, tenant = f"s{self.num_made}", rng.choice(["a", "b"])
        self.num_made += 1
        hit = self.kv.lookup(tokens, tenant)
        if hit.num_tokens:
            self.kv.fork(name, hit)
        if self.kv.extend(name, len(tokens) - hit.num_tokens) is None:
            self.kv.release(name)
            return
        self.kv.publish(name, tokens, tenant)
        self.kv.name_texts(name, len(tokens), [(rng.randrange(1, 40), MAX_SHARE // 2), (self.num_made, MAX_SHARE)])
        self.live.append(name)

    @property
    def truth(self) -> set[int]:
        return {int.from_bytes(digest[:8], "little") for digest in self.kv.groups[0].index.digests}


def test_the_index_equals_the_caches_after_inserts_evictions_and_lost_messages() -> None:
    rng = random.Random(7)
    fleet = Fleet(["a", "b", "c"])
    replicas = [Replica(number, fleet) for number in range(3)]
    for count in range(10_000):
        replica = rng.choice(replicas)
        replica.step(rng)
        if rng.random() < 0.3:
            replica.report(is_lost=rng.random() < 0.05)
        if count % 1000 == 0:
            fleet.index.check()
    for replica in replicas:
        replica.report()
        replica.report()  # the second shows that the one before was lost
        assert set(fleet.index.digests_of(replica.number)) == replica.truth
        assert replica.kv.stats().evictions > 100
        assert replica.num_resyncs > 10
    fleet.index.check()
    assert fleet.index.num_texts > 0


def test_a_match_tells_how_much_each_replica_holds() -> None:
    fleet = Fleet(["a", "b"])
    first, second = (Replica(number, fleet) for number in range(2))
    tokens = list(range(24))
    _insert(first, tokens, [(11, MAX_SHARE // 2), (12, MAX_SHARE)])
    _insert(second, tokens[:12] + [9] * 12, [(11, MAX_SHARE // 2), (13, MAX_SHARE)])
    match = fleet.index.match([11, 12], 0b11)
    assert (match.tokens_of(0), match.tokens_of(1), match.text) == (24, 12, 1)
    assert fleet.index.match([11, 12], 0b10).levels == ((0b10, 12),)
    assert fleet.index.match([99], 0b11).levels == ()


def _insert(replica: Replica, tokens: list[int], marks: list[tuple[int, int]]) -> None:
    replica.kv.extend("s", len(tokens))
    replica.kv.publish("s", tokens, "t")
    replica.kv.name_texts("s", len(tokens), marks)
    replica.report()


def test_forged_and_old_lines_are_refused() -> None:
    reader = FeedReader(KEY)
    writer = FeedWriter.answering(KEY, reader.proof)
    assert writer is not None
    reader.hello(writer.hello(IDENTITY))
    line = writer.frame(FeedFrame("ready"))
    forged = line.replace(b'"ready"', b'"dying"')
    with pytest.raises(FeedError, match="no proof of the cluster key"):
        reader.frame(forged)
    reader.frame(line)
    with pytest.raises(FeedError, match="line 2 is missing"):
        reader.frame(line)  # again
    other = FeedReader(KEY)
    with pytest.raises(FeedError, match="no proof"):
        other.hello(writer.hello(IDENTITY))  # of another conversation


def test_a_router_with_another_key_is_not_answered() -> None:
    other = ClusterKey(b"o" * 32)
    assert FeedWriter.answering(KEY, FeedReader(other).proof) is None
    assert FeedWriter.answering(KEY, "") is None
    assert FeedWriter.answering(KEY, "zz:zz") is None


def test_replicas_that_differ_are_refused_with_the_difference() -> None:
    fleet = Fleet(["a", "b", "c"])
    assert fleet.greet(0, IDENTITY)
    assert not fleet.greet(1, ReplicaIdentity("2", {"m": {"digest": "bb", "block_size": 4}}))
    assert "version 1 and 2; digest of m aa and bb" in fleet.replicas[1].reason
    assert not fleet.greet(2, ReplicaIdentity("1", {"n": {}}))
    assert "models m and n" in fleet.replicas[2].reason
    assert fleet.greet(1, ReplicaIdentity("1", {"m": {"digest": None, "block_size": 4}}))


def test_a_hot_replica_loses_affinity_alone() -> None:
    fleet = Fleet(["a", "b", "c"])
    hasher, prefixes = TextHasher(KEY), {}
    for number in range(3):
        replica = Replica(number, fleet)
        prefixes[number] = hasher.prefix(b"key", {"messages": [{"role": "user", "content": f"{number}" * 400}]})
        assert prefixes[number] is not None
        _insert(replica, [number] * 100, list(prefixes[number].marks()))
    assert [fleet.route(prefixes[n], 0b111)[0] for n in range(3)] == [0, 1, 2]
    fleet.hear(0, FeedFrame("ready", ReplicaLoad(prompt_tokens=int(1000 * AFFINITY))))
    assert fleet.route(prefixes[0], 0b111)[0] != 0
    assert [fleet.route(prefixes[n], 0b111)[0] for n in (1, 2)] == [1, 2]


def test_a_replica_that_says_it_is_busy_beyond_all_bounds_moves_its_own_share_alone() -> None:
    fleet = Fleet(["a", "b", "c"])
    hasher, prefixes = TextHasher(KEY), {}
    for number in range(3):
        replica = Replica(number, fleet)
        prefixes[number] = hasher.prefix(b"key", {"messages": [{"role": "user", "content": f"{number}" * 400}]})
        assert prefixes[number] is not None
        _insert(replica, [number] * 100, list(prefixes[number].marks()))
        if number == 0:
            replica.tell(FeedFrame("ready", ReplicaLoad(2**62, 2**62, 2**62)))
    went = [fleet.route(prefixes[turn % 3], 0b111) for turn in range(300)]
    assert [number for number, _ in went].count(0) == 0
    assert {number for number, _ in went[1::3]} == {1}
    assert {number for number, _ in went[2::3]} == {2}
    for _, routed in went:
        fleet.end(routed)
    fleet.hear(0, FeedFrame("ready", ReplicaLoad()))
    assert [fleet.route(prefixes[n], 0b111)[0] for n in range(3)] == [0, 1, 2]


def test_a_replica_that_says_it_is_idle_is_counted_by_what_it_was_sent() -> None:
    fleet = Fleet(["a", "b"])
    for number in range(2):
        Replica(number, fleet)
    for _ in range(10):
        fleet.hear(0, FeedFrame("ready", ReplicaLoad()))  # a lie
        fleet.route(None, 0b11, num_bytes=4000)
    assert [one.num_open for one in fleet.replicas] == [5, 5]


def test_texts_of_another_key_are_others() -> None:
    hasher = TextHasher(KEY)
    body = {"messages": [{"role": "user", "content": "hi " * 900}]}
    ours, theirs = hasher.prefix(b"alice", body), hasher.prefix(b"bob", body)
    assert ours is not None
    assert theirs is not None
    assert not set(ours.texts) & set(theirs.texts)
    longer = hasher.prefix(b"alice", {"messages": [*body["messages"], {"role": "assistant", "content": "ok"}]})
    assert longer is not None
    assert longer.texts[: len(ours.texts)] == ours.texts


def test_marks_of_somebody_without_the_key_are_ignored() -> None:
    marks = ((1, 2), (3, MAX_SHARE))
    assert read_marks(KEY, write_marks(KEY, marks)) == marks
    assert read_marks(ClusterKey(b"o" * 32), write_marks(KEY, marks)) == ()
    assert read_marks(KEY, b"AAAA") == ()
    assert read_marks(KEY, b"\xff") == ()


def test_a_block_that_a_text_names_takes_less_than_500_bytes_however_many_replicas_hold_it() -> None:
    rng, index, number = random.Random(3), FleetIndex(), 20_000
    tracemalloc.start()
    stored = [PrefixChange(STORED, rng.getrandbits(64), rng.getrandbits(64), BLOCK) for _ in range(number)]
    for replica in range(0, 1000, 111):
        index.apply(replica, stored)
    index.apply(0, [PrefixChange(NAMED, rng.getrandbits(64), change.digest) for change in stored])
    del stored
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert index.num_blocks == index.num_texts == number
    assert taken / number < 500


def test_an_empty_index_has_no_match() -> None:
    assert FleetIndex().match([1, 2], 1).levels == ()
