"""How long steps take, learned from the steps themselves, and how much of them prompts and low priorities may have.

Seconds and row counts in, row counts out; knows no request, no model and no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

MIN_ROWS = 8  # of a prompt in a step that is kept short: as many share the work of a kernel
FIRST_ROWS = 16  # of a prompt beside decodes, as long as nothing is known about their cost
MAX_GROWTH, MAX_SHRINK = 1.25, 0.7  # of the chunk from step to step: one outlier must not delay the others
STEADY = 0.95  # a step that took about the time allowed keeps its rows
MIN_EXTRA = 0.1  # of the step: a prompt advances even when decoding alone takes longer than prefill_ms
NUM_BASES = 3  # steps without prompts that are remembered for each number of decodes ...
NUM_SAMPLES = 7  # ... and steps with prompts; medians of so many ignore outliers
COST_QUANTILE = 0.8  # of the cost of a prompt row, by which steps with low priorities are planned
REFRESH_STEPS = 64  # after so many steps with prompts, two go without them: enough to move the median of three
SURPRISE = 1.3  # times as long as expected, or as short, twice running: the machine has changed, so refresh at once
MIN_REFRESH_STEPS = 16
BACKGROUND_EXTRA = 0.2  # the same for low priorities, which come now and then
BACKGROUND_DECODES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAX_CREDIT = 16  # times prefill_ms: saved up before low priorities run beside a prompt of higher ones
SHORT_SHARE = 1 / 3  # of prefill_ms: the steps of low priorities while higher ones come and go
RECENT_S = 10.0  # a priority that ran this long ago is expected again
DECODE_EXTENT = 4  # times their share: the part of the time added to a step that they take beside decodes
FREE_S = 0.05  # of prompts in a step of free_rows: streams beside it go on at 16 tokens/s, faster than people read
RETRY_EVERY = 64  # a number of low decodes that was too slow once is tried again: the machine may have been busy


@dataclass(slots=True)
class _Base:
    """Steps without prompt rows, for one number of decodes."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_BASES))
    num_wanted: int = 1  # more of them, before prompts are mixed in again
    age: int = 0  # steps with prompts since the last of them
    num_surprises: int = 0

    @property
    def median_s(self) -> float:
        return median(self.seconds)


class Pacer:
    """Chunks of prompts sized by time.

    |---------- step without prompt rows ----------|---- extra: rows x seconds per row ----|
    |<------------ at most max_stretch x that, and never longer than prefill_s ------------>|
    """

    def __init__(
        self, max_stretch: float, prefill_s: float, max_rows: int, min_rows: int = 1, free_rows: int = 0
    ) -> None:
        """min_rows: fewer rows of a prompt are not worth a step, since they would not take less time; free_rows: a step
        of at most so many is not cut short for its decodes' sake, as long as its prompts take FREE_S at most, and one
        with decodes has no more: such a backend has to launch it kernel by kernel, and others wait for that."""
        self._max_stretch = max_stretch
        self._min_rows = min(min_rows, max_rows)
        self._free_rows = min(free_rows, max_rows)
        self._prefill_s = prefill_s
        self._max_rows = max_rows
        self._bases: dict[int, _Base] = {}
        self._beside: deque[tuple[float, int, _Base]] = deque(maxlen=NUM_SAMPLES)  # seconds, prompt rows, what else
        self._alone: deque[tuple[float, int, _Base]] = deque(maxlen=NUM_SAMPLES)  # the same without decodes
        self._no_decodes = _Base(deque([0.0]), num_wanted=0)
        self._last_rows = 0
        self._last_s = 0.0
        self._num_asked = 0

    def prompt_rows(self, num_decodes: int) -> int:
        """Prompt rows the next step may have beside num_decodes others; 0: first measure a step without them."""
        if num_decodes == 0:
            return self._max_rows
        base, extra_s = self._bases.get(_bucket(num_decodes)), self.extra_s(num_decodes)
        if base is None or extra_s == 0:
            return 0
        most = self._free_rows - num_decodes if self._free_rows else self._max_rows
        rows = min(self._steered_rows(base.median_s, extra_s), most)
        return max(self._min_rows, self._free_prompt_rows(num_decodes, base.median_s), rows)

    def _free_prompt_rows(self, num_decodes: int, base_s: float) -> int:
        """By cost and not by feedback: of a crowd that comes at once, none should wait for chunks to grow."""
        free_s = min(FREE_S, self._prefill_s - base_s)
        if not self._free_rows or self.row_s is None or free_s <= 0:
            return 0
        return min(self._free_rows - num_decodes, int(free_s / max(self.row_s, 1e-9)))

    def extra_s(self, num_decodes: int) -> float:
        """Seconds for prompts in the next step beside num_decodes others; 0: first measure a step without them."""
        if num_decodes == 0:
            return math.inf
        base = self._bases.get(_bucket(num_decodes))
        if base is None or self.wants_base(num_decodes):
            return 0.0
        return self._allowed_s(base.median_s) - base.median_s

    def wants_base(self, num_decodes: int) -> bool:
        """Whether prompts wait until a step of these decodes alone was measured."""
        base = self._bases.get(_bucket(num_decodes))
        return base is None or base.num_wanted > 0

    @property
    def short_s(self) -> float:
        """How long a step takes that a request of higher priority may have to wait for."""
        return SHORT_SHARE * self._prefill_s

    def short_rows(self, num_decodes: int) -> int:
        """Prompt rows of such a step; a prompt advances even where the decodes alone take longer."""
        row_s = self.row_s if num_decodes else self._alone_row_s
        if row_s is None:
            return FIRST_ROWS
        extra_s = self.short_s - (self.base_s(num_decodes) or 0.0)
        return max(MIN_ROWS, self._min_rows, min(int(extra_s / max(row_s, 1e-9)), self._max_rows))

    def background_rows(self, num_decodes: int, part: float) -> int:
        """Prompt rows of a step in which low priorities take part: it takes no longer than one without them may.

        By cost and not by feedback: such steps are rare, and say nothing about the chunks of higher priorities.
        """
        extra_s = self.background_extra_s(num_decodes, part)
        if extra_s == 0:
            return 0
        samples = self._beside or self._alone
        rows = int(extra_s / max(_row_s(samples, COST_QUANTILE), 1e-9)) if samples else FIRST_ROWS
        return max(self._min_rows, min(rows, self._max_rows))

    def background_extra_s(self, num_decodes: int, part: float) -> float:
        """Seconds for prompts in such a step; 0: not known yet."""
        base_s = self.base_s(num_decodes)
        return 0.0 if base_s is None else self._background_s(base_s, part) - base_s

    def background_decodes(self, num_decodes: int, num_wanted: int, part: float) -> int:
        """Decodes of low priorities beside num_decodes of higher ones, by the same measure.

        As many as are known to fit, or the next larger number that has not been tried; now and then one is tried again.
        """
        base_s, best = self.base_s(num_decodes), 1
        if base_s is None:
            return min(1, num_wanted)
        allowed_s = self._background_s(base_s, part)
        self._num_asked += 1
        for number in BACKGROUND_DECODES:
            known_s = self.base_s(num_decodes + number)
            if known_s is None or (known_s > allowed_s and self._num_asked % RETRY_EVERY == 0):
                return min(number, num_wanted)
            if known_s > allowed_s:
                break
            best = number
        return min(best, num_wanted)

    def _allowed_s(self, base_s: float) -> float:
        """How long a step may take that would take base_s without what is added to it."""
        return max(min(self._max_stretch * base_s, self._prefill_s), (1 + MIN_EXTRA) * base_s)

    def _background_s(self, base_s: float, part: float) -> float:
        """The same where low priorities get a part of what is added."""
        return base_s + max(part * (self._allowed_s(base_s) - base_s), BACKGROUND_EXTRA * base_s)

    def _steered_rows(self, base_s: float, extra_s: float) -> int:
        """More than last time where the step had room, fewer where it was too long, in bounded moves.

        Feedback and not a cost per row: what a row costs grows with its depth, and not in proportion to the rows.
        """
        if not self._last_rows:
            return FIRST_ROWS if self.row_s is None else min(FIRST_ROWS, int(extra_s / max(self.row_s, 1e-9)))
        move = min(MAX_GROWTH, max(MAX_SHRINK, extra_s / max(self._last_s - base_s, 1e-9)))
        if STEADY <= move <= 1 / STEADY:
            return self._last_rows
        return math.ceil(self._last_rows * move) if move > 1 else int(self._last_rows * move)

    def observe(self, num_decodes: int, num_prompt_rows: int, seconds: float, *, steers: bool = True) -> None:
        """Learn from a step that was just done; steers: the next chunk follows from how long this one took."""
        if num_prompt_rows == 0:
            base = self._bases.setdefault(_bucket(num_decodes), _Base())
            base.seconds.append(seconds)
            base.num_wanted = max(0, base.num_wanted - 1)
            base.age = base.num_surprises = 0
        elif num_decodes == 0:
            self._alone.append((seconds, num_prompt_rows, self._no_decodes))
        elif (known := self._bases.get(_bucket(num_decodes))) is not None:
            self._learn_beside(known, num_decodes, num_prompt_rows, seconds)
            if steers:
                self._last_rows, self._last_s = num_prompt_rows, seconds

    def base_s(self, num_decodes: int) -> float | None:
        """Seconds of a step with num_decodes and no prompt rows; None: not known."""
        base = self._bases.get(_bucket(num_decodes)) if num_decodes else self._no_decodes
        return None if base is None else base.median_s

    def expected_s(self, num_decodes: int, num_prompt_rows: int) -> float | None:
        """Seconds a step should take; None: not known."""
        base_s, row_s = self.base_s(num_decodes), self.row_s
        if base_s is None or (row_s is None and num_prompt_rows):
            return None
        return base_s + (row_s or 0.0) * num_prompt_rows

    def seconds_for(self, num_tokens: int) -> float:
        """Seconds a prompt would take alone; 0.0 as long as nothing is known."""
        return (self._alone_row_s or 0.0) * num_tokens

    @property
    def row_s(self) -> float | None:
        """Seconds per prompt row, beside decodes if that is known."""
        samples = self._beside or self._alone
        return _row_s(samples) if samples else None

    @property
    def _alone_row_s(self) -> float | None:
        """The same without decodes if that is known."""
        samples = self._alone or self._beside
        return _row_s(samples) if samples else None

    def _learn_beside(self, base: _Base, num_decodes: int, num_prompt_rows: int, seconds: float) -> None:
        expected_s = self.expected_s(num_decodes, num_prompt_rows) if self._beside else None
        self._beside.append((seconds, num_prompt_rows, base))
        base.age += 1
        is_surprise = expected_s is not None and not expected_s / SURPRISE <= seconds <= expected_s * SURPRISE
        base.num_surprises = base.num_surprises + 1 if is_surprise else 0
        if base.age >= REFRESH_STEPS or (base.num_surprises >= 2 and base.age >= MIN_REFRESH_STEPS):
            base.num_wanted = 2


class RecentPriority:
    """The highest priority that ran lately: while lower ones run alone, another of its kind is expected."""

    def __init__(self) -> None:
        self.is_expected = False
        self._priority = 0
        self._seen_at = -math.inf

    def see(self, priority: int | None, now: float) -> None:
        """The highest priority that runs now; None: nothing does."""
        if priority is None:
            return
        if priority >= self._priority or now - self._seen_at > RECENT_S:
            self._priority, self._seen_at = priority, now
        self.is_expected = priority < self._priority


class BackgroundShare:
    """A budget of time for low priorities: they earn a share of every step, and pay for what they take."""

    def __init__(self, share: float, prefill_s: float) -> None:
        self._share = share
        self._max_credit_s = MAX_CREDIT * prefill_s
        self._credit_s = 0.0

    @property
    def is_full(self) -> bool:
        """Whether low priorities are not held back at all."""
        return self._share >= 1.0

    def may_run(self, has_prompts: bool) -> bool:
        """Whether they have earned a part of a step; has_prompts: higher priorities have prompts in it or waiting.

        There another delay shows most: they wait until they have saved up as much as they can.
        """
        needed_s = self._max_credit_s if has_prompts else 0.0
        return (self._credit_s >= needed_s and self._credit_s > 0) or self.is_full

    def extent(self, has_prompts: bool, delays_prompts: bool) -> float:
        """How much of the time that may be added to a step they take, by whether higher priorities have prompts.

        Beside decodes alone the step stays shorter than one with prompts, so that the longest step does not grow.
        """
        if not has_prompts:
            return min(DECODE_EXTENT * self._share, 1.0)
        return 1.0 if delays_prompts else self._share

    def settle(self, step_s: float, background_s: float) -> None:
        """Account for one step during which low priorities waited."""
        self._credit_s = min(self._credit_s + self._share * step_s - background_s, self._max_credit_s)

    def reset(self) -> None:
        """No low priority runs or waits: nothing is earned, and nothing is owed."""
        self._credit_s = 0.0


def _bucket(num_decodes: int) -> int:
    """Numbers of decodes that take about the same time: each on its own up to 8, then within 19%."""
    return num_decodes if num_decodes <= 8 else 8 + round(4 * math.log2(num_decodes / 8))


def _row_s(samples: Iterable[tuple[float, int, _Base]], share: float = 0.5) -> float:
    """Seconds per prompt row that a share of the rows did not exceed, weighted: the short end of a prompt says little.

    What else was in the step is subtracted as it is known now, not as it was known then.
    """
    costs = sorted((max(0.0, seconds - base.median_s) / rows, rows) for seconds, rows, base in samples)
    left = share * sum(rows for _, rows in costs)
    for cost, rows in costs:
        left -= rows
        if left <= 0:
            return cost
    raise AssertionError("no samples")
