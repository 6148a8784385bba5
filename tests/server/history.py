"""Histories of requests as clients saw them, and what must be true of every one of them.

A history is recorded while faults are injected and checked afterwards, offline. The oracle is exact: the same request
alone gives the same bytes, so whatever was delivered must be a prefix of the oracle's text.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

Kind = Literal[
    "submit", "accept", "refuse", "delta", "cancel", "cancel-ack", "finish", "error", "usage", "end", "leave"
]
TERMINAL: tuple[Kind, ...] = ("finish", "error")
MAX_STEPS_IN_FLIGHT = 1  # a token of the step that runs while a cancellation is acknowledged


@dataclass(frozen=True, slots=True)
class Event:
    """One thing a client did or saw."""

    kind: Kind
    at: float
    text: str = ""  # of a delta; the reason of a finish, the code of an error or a refusal
    num_tokens: int = 0  # of a delta; reported by a usage or a cancel-ack


@dataclass(slots=True)
class History:
    """One request, in the order its client saw it."""

    body: Mapping[str, Any]
    events: list[Event] = field(default_factory=list)

    def add(self, kind: Kind, text: str = "", num_tokens: int = 0) -> None:
        self.events.append(Event(kind, time.monotonic(), text, num_tokens))

    def of(self, *kinds: Kind) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.of("delta"))

    @property
    def waited(self) -> tuple[float, float]:
        """From when until when the client waited for its first token; inf: it never came."""
        first = self.of("delta")
        return self.of("submit")[0].at, first[0].at if first else math.inf

    @property
    def num_delivered(self) -> int:
        return sum(event.num_tokens for event in self.of("delta"))


def violations(history: History, oracle: str) -> list[str]:
    """Everything that is wrong with one history; oracle is the text of the same request alone."""
    if history.of("refuse"):
        return ["something was delivered after a refusal"] if history.events[-1].kind != "refuse" else []
    if not history.of("accept"):
        return ["neither accepted nor refused"]
    return [*_wrong_end(history), *_wrong_text(history, oracle), *_wrong_usage(history), *_wrong_cancel(history)]


def misplaced_failures(history: History, *, is_at_fault: bool) -> list[str]:
    """A request at fault ends with an error, and no other does."""
    has_failed = bool(history.of("error"))
    if has_failed == is_at_fault or history.of("leave", "cancel", "refuse"):
        return []
    return ["it failed for the fault of another" if has_failed else "it was at fault and did not fail"]


def inversions(higher: Sequence[History], lower: Sequence[History], max_overtaken: int) -> list[str]:
    """Requests of higher priority that waited for their first token while others got theirs.

    max_overtaken: lower ones that the step in flight, and their share of the time, may bring to their first token.
    """
    wrong = []
    for high in higher:
        since, until = high.waited
        before = [low for low in lower if since < low.waited[1] < until]
        if len(before) > max_overtaken:
            wrong.append(f"{len(before)} lower ones had their first token in the {until - since:.2f} s it waited")
    return wrong


def _wrong_end(history: History) -> list[str]:
    """Exactly one terminal event, and nothing after it but usage; a client that left sees none."""
    ends = history.of(*TERMINAL)
    kinds = [event.kind for event in history.events]
    if "leave" in kinds:
        return [] if len(ends) <= 1 else [f"{len(ends)} terminal events"]
    if len(ends) != 1:
        return [f"{len(ends)} terminal events instead of one"]
    after = set(kinds[history.events.index(ends[0]) + 1 :])
    wrong = [f"after the terminal event came {kind}" for kind in after - {"usage", "end", "cancel", "cancel-ack"}]
    if kinds.count("end") != 1:
        wrong.append(f"the response ended {kinds.count('end')} times")
    return wrong


def _wrong_text(history: History, oracle: str) -> list[str]:
    reasons = [event.text for event in history.of("finish")]
    if reasons and reasons[0] in ("length", "stop"):
        return [] if history.text == oracle else [f"text {history.text!r} is not the oracle's {oracle!r}"]
    return [] if oracle.startswith(history.text) else [f"text {history.text!r} is no prefix of {oracle!r}"]


def _wrong_usage(history: History) -> list[str]:
    reports = history.of("usage")
    if len(reports) > 1:
        return [f"usage was reported {len(reports)} times"]
    if history.of("finish") and not history.of("leave") and not reports:
        return ["no usage was reported"]
    told = [event.num_tokens for event in reports]
    return [] if not told or told == [history.num_delivered] else [f"usage {told} for {history.num_delivered} tokens"]


def _wrong_cancel(history: History) -> list[str]:
    """An acknowledged cancellation counts: at most the step in flight still delivers."""
    for ack in history.of("cancel-ack"):
        if history.num_delivered > ack.num_tokens + MAX_STEPS_IN_FLIGHT:
            return [f"{history.num_delivered} tokens were delivered, the cancellation was at {ack.num_tokens}"]
    return []


def ask(http: httpx.Client, body: Mapping[str, Any], plan: Sequence[tuple[int, str]] = ()) -> History:
    """Ask and write down what happens. plan: (after how many tokens, "cancel" or "leave")."""
    history = History(body)
    history.add("submit")
    with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200 and not body.get("stream"):
            response.read()
            _take_failure(history, response)
        elif body.get("stream"):
            history.add("accept")
            _take_stream(http, history, response, list(plan))
        else:
            history.add("accept")
            response.read()
            _take(history, response.json())
            history.add("end")
    return history


def _take_failure(history: History, response: httpx.Response) -> None:
    code = response.json()["error"]["code"]
    if response.status_code >= 500:  # it was accepted and failed
        history.add("accept")
        history.add("error", code)
        history.add("end")
    else:
        history.add("refuse", code)


def _take_stream(http: httpx.Client, history: History, response: httpx.Response, plan: list[tuple[int, str]]) -> None:
    request_id = response.headers["x-request-id"]
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            history.add("end")
            continue
        _take(history, json.loads(data))
        while plan and history.num_delivered >= plan[0][0]:
            _, what = plan.pop(0)
            if what == "leave":
                history.add("leave")
                return
            _cancel(http, history, request_id)


def _cancel(http: httpx.Client, history: History, request_id: str) -> None:
    history.add("cancel")
    answer = http.delete(f"/v1/requests/{request_id}")
    if answer.status_code == 200:  # else it has ended meanwhile
        history.add("cancel-ack", num_tokens=answer.json()["completion_tokens"])


def _take(history: History, data: Mapping[str, Any]) -> None:
    """One chunk of a stream, or a whole answer."""
    if "error" in data:
        history.add("error", data["error"]["code"])
        return
    for choice in data["choices"]:
        tokens = (choice.get("logprobs") or {}).get("tokens") or []
        if choice["text"] or tokens:
            history.add("delta", choice["text"], len(tokens))
        if choice["finish_reason"] is not None:
            history.add("finish", choice["finish_reason"])
    if data.get("usage") is not None:
        history.add("usage", num_tokens=data["usage"]["completion_tokens"])
