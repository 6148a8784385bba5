"""Which part of a limit is whose while nobody counts for all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvarn.server.access.shared.replicas import MAX_REPORTED, Replicas, read_replicas, write_report
from kvarn.server.access.shared.store import shown_url

COUNTS = st.integers(0, 10**6)


@given(limit=COUNTS, used=st.lists(COUNTS, min_size=1, max_size=12), salt=COUNTS)
def test_the_parts_of_all_replicas_add_up_to_the_limit(limit: int, used: list[int], salt: int) -> None:
    total = sum(used)
    parts = [Replicas(len(used), rank).part(limit, own, total - own, salt) or 0 for rank, own in enumerate(used)]
    assert sum(parts) == max(limit, total)  # who has used more than there is gets nothing more
    assert all(part >= own for part, own in zip(parts, used, strict=True))


def test_what_cannot_be_divided_goes_to_different_replicas_for_different_keys() -> None:
    winners = {salt: [Replicas(3, rank).part(1, 0, 0, salt) for rank in range(3)].index(1) for salt in range(6)}
    assert set(winners.values()) == {0, 1, 2}


def test_no_limit_has_no_parts() -> None:
    assert Replicas(3, 0).part(None, 5, 5, 0) is None


def test_reports_are_added_up_without_ones_own() -> None:
    told = [b"a", write_report({"k": (1, 10, 1), "idle": (0, 0, 0)}).encode(), b"b", b'{"k":[2,20,0]}', b"c", b"{}"]
    seen = read_replicas("c", told, None)
    assert (seen.number, seen.rank, seen.others) == (3, 2, {"k": (3, 30, 1)})
    again = read_replicas("c", [b"a", b'{"k":[4,10,0]}', b"c", b"{}"], seen)
    assert (again.number, again.growth) == (2, {"k": (1, 0, 0)})
    assert again.others_by_now("k") == (5, 10, 0)
    assert again.others_by_now("other") == (0, 0, 0)


def test_a_report_names_the_busiest_keys_only() -> None:
    report = write_report({f"k{number}": (number, 0, 0) for number in range(2 * MAX_REPORTED)})
    assert report.count(":") == MAX_REPORTED
    assert f'"k{2 * MAX_REPORTED - 1}"' in report


def test_an_address_is_shown_without_its_password() -> None:
    assert shown_url("redis://user:secret@host:1/0") == "redis://user:…@host:1/0"
    assert shown_url("redis://host:1/0") == "redis://host:1/0"
