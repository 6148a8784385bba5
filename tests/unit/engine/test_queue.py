"""The indexed heap of waiting requests: order, re-keying, and costs that grow with the logarithm."""

from __future__ import annotations

import random
import time
import tracemalloc

from kvarn.engine.scheduling.queue import RequestQueue
from kvarn.request import Request
from kvarn.types import SamplingParams
from tests.submitting import new_request, submit
from tests.unit.engine.fake import make_engine

PARAMS = SamplingParams(max_tokens=4)


class CountedKey(float):
    """A key that counts how often it is compared."""

    num_compared = 0

    def __lt__(self, other: float) -> bool:
        CountedKey.num_compared += 1
        return float.__lt__(self, other)


def make_request(number: int, priority: int = 0) -> Request:
    request = new_request(f"r{number}", (1,), PARAMS, max_total_tokens=5, seed=0, number=number)
    request.priority = priority
    return request


def by_priority(request: Request) -> tuple[float, ...]:
    return (-request.priority,)


def test_the_smallest_key_leaves_first_and_equal_keys_in_order_of_submission() -> None:
    queue = RequestQueue(by_priority)
    for number, priority in enumerate([0, 5, 0, 5, -3]):
        queue.push(make_request(number, priority))
    assert [queue.pop().id for _ in range(5)] == ["r1", "r3", "r0", "r2", "r4"]
    assert queue.peek() is None


def test_a_rekeyed_request_moves_up_or_down() -> None:
    queue = RequestQueue(by_priority)
    requests = [make_request(number) for number in range(6)]
    for request in requests:
        queue.push(request)
    requests[4].priority, requests[0].priority = 9, -9
    queue.rekey(requests[4])
    queue.rekey(requests[0])
    assert [queue.pop().id for _ in range(6)] == ["r4", "r1", "r2", "r3", "r5", "r0"]


def test_any_request_can_be_removed() -> None:
    queue = RequestQueue(by_priority)
    requests = [make_request(number) for number in range(5)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[2])
    assert requests[2] not in queue
    assert requests[3] in queue
    assert [queue.pop().id for _ in range(len(queue))] == ["r0", "r1", "r3", "r4"]


def test_random_operations_agree_with_a_sorted_list() -> None:
    rng, queue, model = random.Random(2), RequestQueue(by_priority), list[Request]()
    for number in range(3_000):
        action = rng.random()
        if action < 0.5 or not model:
            model.append(make_request(number, rng.randint(-5, 5)))
            queue.push(model[-1])
        elif action < 0.65:
            changed = rng.choice(model)
            changed.priority = rng.randint(-5, 5)
            queue.rekey(changed)
        elif action < 0.8:
            queue.remove(model.pop(rng.randrange(len(model))))
        else:
            first = min(model, key=lambda request: (by_priority(request), request.number))
            assert queue.pop() is first
            model.remove(first)
        queue.check()
        assert set(queue) == set(model)


def test_pushing_and_rekeying_cost_the_logarithm_of_the_length() -> None:
    """Comparisons are counted, so that the machine's mood does not matter: x16 requests, + a few per operation."""
    costs = {}
    for size in (625, 10_000):
        rng, queue = random.Random(1), RequestQueue(lambda request: (CountedKey(-request.priority),))
        requests = [make_request(number, rng.randint(-100, 100)) for number in range(size)]
        CountedKey.num_compared = 0
        for request in requests:
            queue.push(request)
        for request in requests:
            request.priority = rng.randint(-100, 100)
            queue.rekey(request)
        costs[size] = CountedKey.num_compared / (2 * size)
    assert costs[10_000] < costs[625] + 10
    assert costs[10_000] < 35


def test_ten_thousand_waiting_requests_are_submitted_and_rekeyed_in_bounded_time_and_memory(patience: float) -> None:
    engine = make_engine(queue_limit=20_000, policy="priority")
    tracemalloc.start()
    seconds = {}
    requests: list[Request] = []
    for size in (1_000, 10_000):
        started_at = time.perf_counter()
        requests += [submit(engine, [1, 2, 3], PARAMS) for _ in range(size - len(requests))]
        for request in requests[-500:]:
            engine.reprioritise(request, 3)
        seconds[size] = time.perf_counter() - started_at
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert engine.scheduler.num_waiting == 10_000
    assert seconds[10_000] < 30 * patience * seconds[1_000]
    assert num_bytes < 40e6
    for request in requests:
        request.is_cancel_requested = True
    engine.step()
    assert engine.scheduler.num_waiting == 0
