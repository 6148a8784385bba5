"""Guessed tokens computed beside the next one: who guesses for a request, how many guesses get rows, what came of it.

A draft never changes an answer: the decoder chooses every token as it would without, and keeps those drafts that turn
out to be what it chose. Knows tokens and seconds; sees no logits and no block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kvarn.backends.protocol import Hidden
from kvarn.decoding.speculation.acceptance import AcceptanceRates
from kvarn.decoding.speculation.drafters import Drafter, EarlierAnswers, PredictedAnswer, PromptLookup, Proposal
from kvarn.decoding.speculation.model_drafts import DraftLength, ModelDrafts, gains_of
from kvarn.decoding.speculation.tenant_texts import TenantRegistry
from kvarn.request import Request

MAX_DRAFT = 15  # tokens for one request in one step
DraftersOf = Callable[[Request], Iterator[Drafter]]


@dataclass(slots=True)
class DraftCounts:
    """Since the start: steps of a request with drafts, the drafts in them, those that were right, by position."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT)


@dataclass(slots=True)
class DraftState:
    """What is known about one request; kept as request.drafting."""

    drafters: tuple[Drafter, ...]
    rates: AcceptanceRates
    proposal: Proposal | None = None
    proposed_at: int = 0  # tokens of the request then
    granted: int = 0  # tokens of the proposal that the step being planned computes

    def settle(self, token_ids: Sequence[int]) -> None:
        """Compare what was proposed with what came, computed or not."""
        if self.proposal is None:
            return
        source, proposed, match = self.proposal
        for offset, (token_id, came) in enumerate(zip(proposed, token_ids[self.proposed_at :], strict=False)):
            self.rates.observe(source, match + offset, token_id == came)
            if token_id != came:
                break
        self.proposal = None

    def take_better(self, found: Proposal | None) -> None:
        """Propose this, if more of it is expected to be right than of what is proposed so far."""
        if found is None:
            return
        worth, previous = sum(self.gains()), self.proposal
        self.proposal = found
        if sum(self.gains()) <= worth:
            self.proposal = previous

    def gains(self) -> list[float]:
        """The chance of each proposed token to be reached and right."""
        if self.proposal is None:
            return []
        source, token_ids, match = self.proposal
        chance, found = 1.0, []
        for offset in range(len(token_ids)):
            chance *= self.rates.rate(source, match + offset)
            found.append(chance)
        return found


class Speculation:
    """Drafts for the requests of one engine. methods: those of kvarn.config.SPECULATION_METHODS that are on."""

    def __init__(self, methods: frozenset[str], length: DraftLength, is_token: Callable[[int], bool]) -> None:
        self.length = length
        self.counts = DraftCounts()
        self.model_drafts: ModelDrafts | None = None
        self.extra: list[DraftersOf] = []  # further drafters of a request
        self._methods = methods
        self._is_token = is_token
        self._tenants = TenantRegistry(keeps_answers="suffix" in methods)

    def plan(self, requests: Sequence[Request], max_rows: int) -> Mapping[str, int]:
        """How many drafts of each of these requests, which all decode, the next step computes; max_rows: of all."""
        num_wanted = min(MAX_DRAFT * len(requests), max_rows)
        if num_wanted <= 0 or not self.length.may_pay(len(requests), num_wanted):
            return {}
        states = {request.id: state for request in requests if (state := self._propose(request)) is not None}
        if self.model_drafts is not None:
            self._draft_by_model([one for one in requests if one.id in states], len(requests), num_wanted)
        gains = [(gain, name) for name, state in states.items() for gain in state.gains()]
        gains.sort(key=lambda pair: -pair[0])  # of one request in order: no later one is more probable
        gains = gains[:num_wanted]
        for _, name in gains[: self.length.num_rows(len(requests), [gain for gain, _ in gains])]:
            states[name].granted += 1
        return {name: state.granted for name, state in states.items() if state.granted}

    def drafts(self, request: Request, max_tokens: int) -> Sequence[int]:
        """The drafts that plan() granted a request."""
        state: DraftState | None = request.drafting
        if state is None or state.proposal is None or state.proposed_at != len(request.token_ids):
            return ()
        return tuple(state.proposal.token_ids[: min(state.granted, max_tokens)])

    def count(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Some of a request's drafts were computed, and the first num_accepted of them were right."""
        counts, state = self.counts, request.drafting
        counts.num_drafts += 1
        counts.num_draft_tokens += num_drafts
        counts.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            counts.accepted_per_position[position] += 1
        if state is not None and state.proposal is not None and state.proposal.source == "prediction":
            request.num_accepted_prediction += num_accepted
            request.num_rejected_prediction += num_drafts - num_accepted

    @property
    def reads_states(self) -> bool:
        """Whether guesses are made from the model's states at all."""
        return self.model_drafts is not None and self.model_drafts.reads_states

    def wants_states(self, request: Request) -> bool:
        """Whether guesses for this request are made from the states of all its positions."""
        if not self.reads_states:
            return False
        params = request.params
        has_others = params.sampler is not None or params.prefill_only or request.wants_prompt_logprobs
        return params.speculate and not has_others

    def take_states(self, request: Request, start: int, states: Hidden) -> None:
        """The model's states of a request from position start on."""
        assert self.model_drafts is not None
        self.model_drafts.take_states(request, start, states)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn from a step without prompt rows; its seconds are without those of take_drafting_s()."""
        self.length.observe(num_rows, seconds)

    def take_drafting_s(self) -> float:
        """Seconds that the last step spent in a draft model before its own rows were computed."""
        return 0.0 if self.model_drafts is None else self.model_drafts.take_spent_s()

    def close(self) -> None:
        if self.model_drafts is not None:
            self.model_drafts.model.close()

    def end(self, request: Request) -> None:
        """A request has ended: remember its answer, if that is wanted, and nothing else."""
        if self.model_drafts is not None:
            self.model_drafts.release(request.id)
        if request.drafting is not None:
            request.drafting.settle(request.token_ids)
            self._tenants.add(request)
        request.drafting = None

    def _propose(self, request: Request) -> DraftState | None:
        """A request with the best proposal that is there for nothing, if there is one; None: it wants none."""
        params, room = request.params, request.max_total_tokens - len(request.token_ids) - 1
        if not params.speculate or params.sampler is not None or room <= 0:
            return None
        state: DraftState | None = request.drafting
        if state is None:
            rates = AcceptanceRates(self._tenants.of(request.tenant).rates)
            state = request.drafting = DraftState(tuple(self._drafters(request)), rates)
        state.settle(request.token_ids)
        state.granted = 0
        state.proposed_at = len(request.token_ids)
        for drafter in state.drafters:
            state.take_better(self._valid(request, drafter.propose(request, min(MAX_DRAFT, room))))
        return state

    def _draft_by_model(self, requests: Sequence[Request], num_decodes: int, max_rows: int) -> None:
        """Ask the draft model about those for which it is more likely to be right than what was found already."""
        assert self.model_drafts is not None
        rates: dict[Request, AcceptanceRates] = {}
        for request in requests:
            state: DraftState = request.drafting
            if next(iter(state.gains()), 0.0) < gains_of(state.rates)[0]:
                rates[request] = state.rates
        for name, proposal in self.model_drafts.proposals(rates, num_decodes, max_rows, self.length).items():
            request = next(one for one in rates if one.id == name)
            room = request.max_total_tokens - len(request.token_ids) - 1
            request.drafting.take_better(self._valid(request, proposal._replace(token_ids=proposal.token_ids[:room])))

    def _valid(self, request: Request, proposal: Proposal | None) -> Proposal | None:
        """As much of a proposal as may follow: tokens of the model that the request's constraint takes."""
        if proposal is None:
            return None
        token_ids = list(proposal.token_ids)
        bad = next((i for i, token_id in enumerate(token_ids) if not self._is_token(token_id)), len(token_ids))
        token_ids = token_ids[:bad]
        if request.sampling is not None:
            token_ids = token_ids[: request.sampling.num_valid(request, token_ids)]
        return proposal._replace(token_ids=token_ids) if token_ids else None

    def _drafters(self, request: Request) -> Iterator[Drafter]:
        if "prediction" in self._methods and request.prediction_ids:
            yield PredictedAnswer(request.prediction_ids, request.num_prompt)
        if "ngram" in self._methods:
            yield PromptLookup()
        answers = self._tenants.of(request.tenant).answers
        if answers is not None:
            yield EarlierAnswers(answers)
        if "grammar" in self._methods and request.constraint is not None:
            yield ForcedTokens()
        yield from chain.from_iterable(make(request) for make in self.extra)


class ForcedTokens:
    """What a request's constraint leaves no choice about."""

    source = "grammar"

    def propose(self, request: Request, max_tokens: int) -> Proposal | None:
        token_ids = [] if request.sampling is None else request.sampling.forced(request)
        return Proposal(self.source, token_ids[:max_tokens], len(token_ids)) if token_ids else None
