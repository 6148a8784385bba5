"""Speculation beside none, on the same requests in turns: CPU seconds of one thread, prompts cached, answers compared.

    python -m benchmarks.speculation MODEL [--case code-edit] [--rounds 3] [--tokens 160] [--write]

CPU time and not the clock, so that a busy machine can still tell the ratio. Prints a table and one line of JSON, last.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.results import write_result

from kvarn import LLM, Completion, EngineConfig, SamplingParams
from kvarn.decoding.speculation.speculation import Speculation
from kvarn.engine.engine import Engine

CODE = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("insufficient funds")
        self.balance -= amount
        return self.balance
"""
PASSAGES = (
    "The mill at Kvarnby was built in 1742 by the brothers Nils and Per Larsson, who brought the stones from the "
    "quarry at Hoor on sledges during two winters. It had two pairs of stones and a wheel of five metres.\n"
    "In 1816 the wheel was replaced by a larger one of iron, made at the foundry of Kockum in Malmo, and the output "
    "rose from twelve to thirty barrels of flour a day, which were sold at the market in Lund.\n"
    "The last miller, Anna Svensson, closed the mill in 1931, when the new road had made the trip to the steam mill in "
    "the city shorter than the wait for water in a dry summer."
)
TOOL = (
    'Answer with one JSON object like {"tool": "search_files", "arguments": {"path": "src", "pattern": "...", '
    '"recursive": true, "max_results": 20}, "reason": "..."} and nothing else. '
)
WANTED = ["the class Account", "the word deposit", "all tests", "the function main", "imports", "the word owner"]
PLACES = ["server", "engine", "tests", "docs"]  # another one each round: no answer was given before
TALK = [
    "Why is the sky blue?",
    "Write a short story about a river.",
    "What makes a good teacher?",
    "Plan a day in Rome.",
]


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True, slots=True)
class Ask:
    """One chat of a case."""

    text: str
    params: SamplingParams


def code_edit(tokens: int, turn: int) -> list[Ask]:  # noqa: ARG001
    params = SamplingParams(temperature=0.0, max_tokens=tokens, prediction=f"```python\n{CODE}```")
    edit = "Rename the parameter amount of withdraw to value. Answer with the whole file.\n\n```python\n" + CODE + "```"
    return [Ask(edit, params)]


def quoting(tokens: int, turn: int) -> list[Ask]:  # noqa: ARG001
    ask = "Quote, word for word, all sentences of the text about the mill.\n\n" + PASSAGES
    return [Ask(ask, SamplingParams(temperature=0.0, max_tokens=tokens))]


def agent_json(tokens: int, turn: int) -> list[Ask]:
    params = SamplingParams(temperature=0.0, max_tokens=min(tokens, 80))
    place = PLACES[turn % len(PLACES)]
    return [Ask(f"{TOOL}The task: find {what} in {place}", params) for what in WANTED]


def open_chat(tokens: int, turn: int) -> list[Ask]:  # noqa: ARG001
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=tokens)
    return [Ask(text, params) for text in TALK[:2]]


def batch_16(tokens: int, turn: int) -> list[Ask]:  # noqa: ARG001
    params = SamplingParams(temperature=0.7, max_tokens=min(tokens, 60))
    return [Ask(text, params.replace(seed=seed)) for seed in range(4) for text in TALK]


CASES = {
    "code-edit": (code_edit, "auto"),
    "quoting": (quoting, "auto"),
    "agent-json": (agent_json, "auto,suffix"),
    "open-chat": (open_chat, "auto"),
    "batch-16": (batch_16, "auto"),
}
TOGETHER = ("batch-16",)  # all at once; the others one after another


def measure(model: str, name: str, rounds: int, tokens: int) -> dict[str, Any]:
    """Medians of some rounds, after one of each that fills caches and learns.

    One engine, with speculation and without: of two that are alike one may be 7% slower by where its memory lies.
    """
    ask, methods = CASES[name]
    config = EngineConfig(threads=1, context=2048, speculation=methods)
    with LLM(model, config=config) as llm:
        speculation = set_speculation(llm, None)
        spent: dict[bool, list[Spent]] = {False: [], True: []}
        for turn in range(rounds + 1):
            answers: dict[bool, list[Completion]] = {}
            for is_on in (False, True) if turn % 2 else (True, False):  # what drifts meanwhile meets both alike
                set_speculation(llm, speculation if is_on else None)
                began = Spent.now()
                answers[is_on] = answered(llm, ask(tokens, turn), together=name in TOGETHER)
                spent[is_on].append(Spent.now() - began)
            assert said(answers[False]) == said(answers[True]), f"{name}: the answers differ"
        set_speculation(llm, speculation)
        stats, isa, num_tokens = llm.stats(), llm.isa, sum(len(one.token_ids) for one in answers[False])
    pairs = list(zip(spent[False], spent[True], strict=True))
    ratios = [off.cpu_s / on.cpu_s for off, on in pairs]
    return {
        "speedup": round(median(ratios[1:]), 3),
        "speedups": [round(ratio, 3) for ratio in ratios[1:]],
        "speedup_of_medians": round(
            median(one.cpu_s for one, _ in pairs[1:]) / median(one.cpu_s for _, one in pairs[1:]), 3
        ),
        "speedup_by_the_clock": round(median(off.clock_s / on.clock_s for off, on in pairs[1:]), 3),
        "first_round": round(ratios[0], 3),
        "tokens": num_tokens,
        "drafted": stats.draft_tokens,
        "accepted": sum(stats.accepted_per_position),
        "isa": isa,
    }


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of this process and of the clock."""

    cpu_s: float
    clock_s: float

    @classmethod
    def now(cls) -> Spent:
        return cls(time.process_time(), time.perf_counter())

    def __sub__(self, before: Spent) -> Spent:
        return Spent(self.cpu_s - before.cpu_s, self.clock_s - before.clock_s)


def set_speculation(llm: LLM, speculation: Speculation | None) -> Speculation | None:
    """What guesses from now on, in an idle engine; what did until now."""

    def exchange(engine: Engine) -> Speculation | None:
        previous, engine.decoder.speculation = engine.decoder.speculation, speculation
        return previous

    previous: Speculation | None = llm.client.call(exchange).result()
    return previous


def answered(llm: LLM, asks: Sequence[Ask], *, together: bool) -> list[Completion]:
    if together:
        handles = [llm.submit(chat(one.text), one.params) for one in asks]
        return [handle.result() for handle in handles]
    return [llm.chat(chat(one.text), one.params) for one in asks]


def said(answers: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--write", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    arguments = parser.parse_args()
    found = {}
    for name in arguments.case or CASES:
        found[name] = measure(arguments.model, name, arguments.rounds, arguments.tokens)
        figures = found[name]
        print(f"{name:12} {figures['speedup']:6.2f} x  {figures['accepted']} of {figures['drafted']} drafts right")
    if arguments.write:
        options = [word for word in sys.argv[1:] if word != arguments.model]
        write_result(arguments.write, found, command=f"python -m benchmarks.speculation MODEL {shlex.join(options)}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
