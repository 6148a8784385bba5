"""Random lives of an engine: whatever happens around it, a request gets exactly the answer it would get alone.

Operations: submit (also n choices, which fork), step, cancel, preempt, evict, compact, and steps that fail, are
interrupted or compute nonsense; pools of 2 to 500 blocks, also with layers that keep a window only. After each: the
cache's own check, and the invariants below.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from functools import cache

import pytest

from kvarn.backends.fake import FakeBackend
from kvarn.config import POLICIES
from kvarn.decoding.speculation.draft_length import Always, ByCost
from kvarn.decoding.speculation.drafters import Proposal
from kvarn.decoding.speculation.speculation import Speculation
from kvarn.engine.engine import Engine
from kvarn.engine.scheduling.plan import StepPlan
from kvarn.errors import InvalidParameter, PromptTooLong
from kvarn.kv.group import WindowShape
from kvarn.request import Request, RequestState
from kvarn.types import Completion, FinishReason, SamplingParams
from tests.conftest import Size
from tests.submitting import submit
from tests.unit.engine.fake import LAYOUT, SimulatedClock, completion_of, make_engine, run_to_end

BOMB, NAN = 255, 254  # computing the first raises, the second gives no numbers
POISON = {BOMB: RuntimeError("poisoned"), NAN: "nan"}
POOLS = {"tiny": (2, 3, 4), "small": (6, 10, 25), "large": (100, 500)}
CONTEXT = 60
MAX_OPEN = 14
MAX_STEPS_OPEN = 1000  # no request stays longer, whatever its priority and its neighbours
Place = tuple[tuple[float, ...], int, int]  # key, number, preemptions
PREFIXES = [tuple(random.Random(seed).choices(range(1, 250), k=30)) for seed in range(3)]


class World:
    """One engine, the requests it has open, and what may have happened to them."""

    def __init__(self, rng: random.Random, pools: Sequence[int], runs_ahead: bool, has_window: bool) -> None:
        self.rng = rng
        self.engine = random_engine(rng, pools, runs_ahead, has_window)
        self.backend: FakeBackend = self.engine.backend  # type: ignore[assignment]
        self.backend.is_late = lambda: rng.random() < 0.05
        self.had_nonsense = False  # in the step before, which may be read in this one
        self.open: dict[str, tuple[Request, int]] = {}  # and the step it came in
        self.excused: set[str] = set()  # had a row in a step whose logits were nonsense
        self.num_steps = 0
        self.num_ended = 0
        self.longest = 0
        self.num_steady = 0  # steps planned as arrays
        self.num_freed = 0  # tables in front of whose window something was missing, by step
        self.num_ranked = 0  # pairs of prompts one of which outranks the other
        plan = self.engine.scheduler.plan

        def observed(newest: StepPlan | None = None) -> StepPlan:
            first = self.engine.scheduler._live.waiting.peek()
            found = plan(newest)
            self.num_steady += found.decodes is not None
            self.check_ranks(found, None if first is None or first.state is RequestState.RUNNING else first)
            return found

        self.engine.scheduler.plan = observed  # type: ignore[method-assign]

    def submit(self) -> None:
        if len(self.open) >= MAX_OPEN:
            return
        prompt, params = random_prompt(self.rng, self.engine.admission.context), random_params(self.rng)
        options = {"tenant": self.rng.choice(["", "", "other"]), "is_streamed": self.rng.random() < 0.5}
        try:
            first = submit(self.engine, prompt, params, **options)
        except (PromptTooLong, InvalidParameter):
            return
        self.open[first.id] = first, self.num_steps
        for choice in range(1, params.n):
            other = submit(self.engine, prompt, params, **options, choice=choice, fork_of=first)
            self.open[other.id] = other, self.num_steps

    def step(self) -> None:
        places = queue_of(self.engine)
        self.num_steps += 1
        fault = self.backend.faults.get(len(self.backend.batch_sizes))
        try:
            events = self.engine.step()
        except KeyboardInterrupt:
            return
        for request, _ in self.open.values():
            if (fault == "nan" or self.had_nonsense) and request.is_ended:
                self.excused.add(request.id)
        self.had_nonsense = fault == "nan"
        self.check_order(places)
        for event in events:
            if event.completion is not None:
                request, since = self.open.pop(event.request_id)
                self.longest = max(self.longest, self.num_steps - since)
                self.check_answer(request, event.completion)
        oldest = min((since for _, since in self.open.values()), default=self.num_steps)
        assert self.num_steps - oldest <= MAX_STEPS_OPEN, "somebody starves"

    def cancel(self) -> None:
        if self.open:
            self.rng.choice(list(self.open.values()))[0].is_cancel_requested = True

    def preempt(self) -> None:
        running = [request for request, _ in self.open.values() if request.state is RequestState.RUNNING]
        if running:
            self.engine.scheduler.preempt(self.rng.choice(running))

    def reprioritise(self) -> None:
        if self.open:
            self.engine.reprioritise(self.rng.choice(list(self.open.values()))[0], self.rng.randint(-2, 2))

    def evict(self) -> None:
        for group in range(len(self.engine.kv.groups)):
            self.backend.return_kv(self.engine.kv.reclaim(drop_cached=True, group=group), group)

    def compact(self) -> None:
        for group in range(len(self.engine.kv.groups)):
            self.backend.return_kv(self.engine.kv.reclaim(group=group), group)

    def fail(self) -> None:
        faults = [RuntimeError("boom"), MemoryError(), KeyboardInterrupt(), "nan"]
        self.backend.faults[len(self.backend.batch_sizes)] = self.rng.choice(faults)
        self.step()

    def check(self) -> None:
        self.engine.kv.check()
        self.num_freed += sum(table.num_freed > 0 for table in self.engine.kv.groups[-1].tables.values())
        self.engine.scheduler._live.waiting.check()
        for request, _ in self.open.values():
            held = self.engine.kv.num_tokens(request.id)
            chunk = self.engine.scheduler._layerwise.chunk
            num_under_way = chunk.num_rows if chunk is not None and chunk.request is request else 0
            is_running = request.state is RequestState.RUNNING
            assert held == (request.num_computed + request.num_launched + num_under_way if is_running else 0)
        num_alive = sum(not request.is_ended for request, _ in self.open.values())
        assert self.engine.scheduler.num_running + self.engine.scheduler.num_waiting == num_alive

    def check_ranks(self, plan: StepPlan, first: Request | None) -> None:
        """No prompt was given rows while a higher one, also one that waits and could have started, was given none.

        first: of the queue, if it still waits. Those behind it wait for it, whatever their priority.
        """
        scheduler, policy, now = self.engine.scheduler, self.engine.scheduler._policy, self.engine._clock()
        parts = [*plan.entries, *([] if plan.layerwise is None else [plan.layerwise.entry])]
        served = {entry.span.request.id: entry.span.request for entry in parts}
        prompts = [request for request in scheduler._live.running.values() if request.is_prefilling]
        for low, high in itertools.product(prompts, prompts if first is None else [*prompts, first]):
            if low.priority >= high.priority or not policy.is_background(low, high.priority, now):
                continue
            self.num_ranked += 1
            could_have = high is not first or (policy.may_displace(high, low) and self.has_room(high))
            if low.id in served and high.id not in served and could_have:
                assert self.is_excused(high, served.values()), f"{low.id} was given rows before {high.id}"

    def has_room(self, waiting: Request) -> bool:
        """Whether it fits in the place of those it may displace, beside the next tokens of the others."""
        kv, policy = self.engine.kv, self.engine.scheduler._policy
        running = self.engine.scheduler._live.running.values()
        staying = [other for other in running if not policy.may_displace(waiting, other)]
        tables = {other.id: kv.block_ids(other.id).tolist() if kv.num_tokens(other.id) else [] for other in staying}
        held = {block_id for table in tables.values() for block_id in table}
        growth = [kv.blocks_for(len(other.token_ids) + 1) - len(tables[other.id]) for other in staying]
        wanted = kv.blocks_for(len(waiting.token_ids)) + sum(max(0, blocks) for blocks in growth)
        has_place = len(staying) < self.engine.config.max_running and len(kv.groups) == 1  # windows: not known here
        return has_place and not waiting.num_under_way and wanted <= kv.num_blocks - len(held)

    def is_excused(self, high: Request, served: Iterable[Request]) -> bool:
        """It waits for a prefix that others compute, goes layer by layer, or the step was earned by low priorities.

        Or it sits the step out beside one of the highest, which came after a low one in the queue and started with it.
        """
        scheduler = self.engine.scheduler
        running = scheduler._live.running.values()
        top = max(request.priority for request in running)
        is_low = high.priority < top and scheduler._policy.is_background(high, top, self.engine._clock())
        block = high.prompt_ids[: self.engine.kv.block_size]
        return (
            scheduler._layerwise.holds(high)
            or (scheduler._fairness._part == "prompts" and not is_low)
            or (scheduler._fairness._part is None and is_low and not scheduler._fairness._background)
            or any(other.prompt_ids[: len(block)] == block for other in served)
        )

    def check_order(self, keys: dict[str, Place]) -> None:
        """Nobody was taken from the queue while one before it was left there."""
        left = {name: place for name, place in queue_of(self.engine).items() if place == keys.get(name)}
        started = [keys[r.id] for r, _ in self.open.values() if r.id in keys and r.state is RequestState.RUNNING]
        assert not left or not started or max(started)[:2] < min(left.values())[:2]

    def check_answer(self, request: Request, completion: Completion) -> None:
        self.num_ended += 1
        expected = alone(request.prompt_ids, request.params.replace(n=1, deadline_s=None), request.choice)
        num_tokens = len(completion.token_ids)
        assert completion.token_ids == expected.token_ids[:num_tokens]
        is_cut = num_tokens == request.max_total_tokens - request.num_prompt  # by a pool too small for more
        if completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert is_cut or completion.finish_reason is expected.finish_reason
            assert is_cut or num_tokens == len(expected.token_ids)
            assert completion.prompt_logprobs == (expected.prompt_logprobs if request.choice == 0 else None)
        elif completion.finish_reason is FinishReason.FAILED:
            tokens = (*request.prompt_ids, *expected.token_ids)
            assert request.id in self.excused or BOMB in tokens or NAN in tokens, "a neighbour's fault reached it"

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()
            self.check()
        assert not self.open
        assert all(self.engine.kv.stats(group).used == 0 for group in range(len(self.engine.kv.groups)))
        assert not list(self.engine.scheduler.requests())


OPERATIONS = {
    World.submit: 20,
    World.step: 60,
    World.cancel: 2,
    World.preempt: 3,
    World.reprioritise: 2,
    World.evict: 1,
    World.compact: 2,
    World.fail: 2,
}


@pytest.mark.parametrize("has_window", [False, True], ids=["full", "window"])
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "runs-ahead"])
@pytest.mark.parametrize("pools", POOLS)
def test_whatever_happens_every_request_gets_its_own_answer(
    pools: str, runs_ahead: bool, has_window: bool, size: Size
) -> None:
    """The one it would get alone."""
    rng, num_operations = random.Random(pools), size(800, 18_000) if has_window else size(1_400, 36_000)
    num_ended = num_preemptions = num_hits = longest = num_ranked = num_steady = num_freed = num_accepted = 0
    for _ in range(num_operations // 200):
        world = World(rng, POOLS[pools], runs_ahead, has_window)
        for operation in rng.choices(list(OPERATIONS), list(OPERATIONS.values()), k=200):
            operation(world)
            world.check()
        world.drain()
        stats = world.engine.stats()
        num_ended += world.num_ended
        num_preemptions += stats.preemptions
        num_hits += stats.prefix_hit_tokens
        num_ranked += world.num_ranked
        num_freed += world.num_freed
        num_steady += world.num_steady
        num_accepted += sum(stats.accepted_per_position)
        longest = max(longest, world.longest)
    counts = f"{num_ended} ended, {num_preemptions} preempted, {num_hits} tokens hit, {num_steady} steady steps"
    print(f"{pools}: {counts}, at most {longest} steps, ranked {num_ranked}")
    assert num_ended > num_operations // 20
    assert num_preemptions > num_operations // 100
    assert num_hits > num_operations // 100
    assert num_ranked > num_operations // 1000
    assert (num_freed > num_operations // 100) == has_window
    assert num_steady > num_operations // 50
    assert num_accepted == 0 if runs_ahead else num_accepted > 0 or pools == "tiny"  # where no block is to spare


def queue_of(engine: Engine) -> dict[str, Place]:
    """Where each waiting request stands, and how often it was preempted before."""
    heap = engine.scheduler._live.waiting._heap
    return {request.id: (key, number, request.num_preemptions) for key, number, request in heap}


def random_engine(rng: random.Random, pools: Sequence[int], runs_ahead: bool, has_window: bool) -> Engine:
    clock = SimulatedClock(step_s=0.010, row_s=0.0005)
    num_blocks, max_batch_tokens = rng.choice(pools), rng.choice([1, 4, 16, 64])
    engine = make_engine(
        num_blocks=num_blocks,
        context=CONTEXT,
        max_batch_tokens=max_batch_tokens,
        window=random_window(rng, num_blocks, max_batch_tokens) if has_window else None,
        poison=POISON,  # type: ignore[arg-type]
        clock=clock,
        runs_ahead=runs_ahead,
        policy=rng.choice(POLICIES),
        max_running=rng.choice([1, 3, 16]),
        max_stretch=rng.choice([1.0, 1.5, 3.0]),
        background_share=rng.choice([0.0, 0.15, 1.0]),
        ageing_s=0.5,
        max_wait_ms=0.0,
        prefix_cache=rng.random() < 0.8,
    )
    if not runs_ahead and (number := rng.random()) < 0.75:
        length = Always() if number < 0.4 else ByCost(engine.config.max_stretch)
        engine.decoder.speculation = speculation = Speculation(frozenset({"ngram", "suffix"}), length, lambda _: True)
        speculation.extra.append(lambda request: iter([RandomDrafter(rng, request)]))
    return engine


class RandomDrafter:
    """Knows the answer, and says something else now and then, also what cannot be computed."""

    source = "random"

    def __init__(self, rng: random.Random, request: Request) -> None:
        params = request.params.replace(n=1, deadline_s=None, max_tokens=16)
        self._answer = alone(request.prompt_ids, params, request.choice).token_ids
        self._rng = rng

    def propose(self, request: Request, max_tokens: int) -> Proposal | None:
        rest = self._answer[request.num_output :][: self._rng.randint(0, max_tokens)]
        found = [self._rng.choice([one] * 9 + [self._rng.randrange(256)]) for one in rest]
        return Proposal(self.source, found, 2) if found else None


def random_window(rng: random.Random, num_blocks: int, max_batch_tokens: int) -> WindowShape:
    """With the fewest blocks that let every request run, or some more."""
    num_tokens, step_tokens = rng.choice([1, 3, 8, 20]), 2 * max_batch_tokens
    least = -(-(num_tokens + step_tokens) // LAYOUT.block_size) + 3
    return WindowShape(num_tokens, rng.choice([least, least + 2, least + num_blocks]), step_tokens)


def random_prompt(rng: random.Random, context: int) -> tuple[int, ...]:
    """Often a prefix others have too; mostly one that fits."""
    shared = rng.choice(PREFIXES)[: rng.choice([0, 4, 7, 16, 30])]
    prompt = (*shared, *rng.choices(range(1, 250), k=rng.randint(1, 12)))
    if rng.random() < 0.95:
        prompt = prompt[: max(1, context - rng.randint(1, 8))]
    return (*prompt[:-1], rng.choice([BOMB, NAN])) if rng.random() < 0.05 else prompt


def random_params(rng: random.Random) -> SamplingParams:
    params = SamplingParams(
        temperature=rng.choice([0.0, 50.0]),
        seed=rng.randint(0, 5),
        max_tokens=rng.randint(1, 16),
        n=rng.choice([1, 1, 1, 1, 2, 4]),
        ignore_eos=rng.random() < 0.5,
        presence_penalty=rng.choice([0.0, 0.0, 1.5]),
        logprobs=rng.choice([None, None, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        priority=rng.randint(-2, 2),
        deadline_s=rng.choice([None, None, None, 0.3]),
        slo_ms=rng.choice([None, 10.0, 1000.0]),
        reuse_cache=rng.random() < 0.9,
        free_cache_on_finish=rng.random() < 0.1,
        prefill_only=rng.random() < 0.05,
    )
    return params.replace(keep_cache=params.seed == 0)


def alone(prompt: tuple[int, ...], params: SamplingParams, choice: int) -> Completion:
    """The completion of a request that has an engine for itself."""
    return _alone(prompt, tuple((name, getattr(params, name)) for name in ASKED), choice)


ASKED = ("temperature", "seed", "max_tokens", "ignore_eos", "presence_penalty", "prompt_logprobs", "prefill_only")


@cache
def _alone(prompt: tuple[int, ...], params: tuple[tuple[str, object], ...], choice: int) -> Completion:
    engine = make_engine(context=CONTEXT, max_batch_tokens=64, poison=POISON)  # type: ignore[arg-type]
    engine.scheduler._steady.plan = lambda *_: None  # type: ignore[method-assign]
    request = submit(engine, prompt, SamplingParams(**dict(params)), choice=choice)  # type: ignore[arg-type]
    return completion_of(run_to_end(engine), request)
