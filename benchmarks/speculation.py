"""Speculation beside none, on the same requests in turns: CPU seconds of one thread, prompts cached, answers compared.

    python -m benchmarks.speculation MODEL [--case code-edit] [--rounds 3] [--tokens 160] [--write]

CPU time and not the clock, so that a busy machine can still tell the ratio. Prints a table and one line of JSON, last.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from tests.results import write_result

from kvarn import LLM, Completion, EngineConfig, SamplingParams

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


def code_edit(llm: LLM, tokens: int, turn: int) -> list[Completion]:  # noqa: ARG001
    params = SamplingParams(temperature=0.0, max_tokens=tokens, prediction=f"```python\n{CODE}```")
    edit = "Rename the parameter amount of withdraw to value. Answer with the whole file.\n\n```python\n" + CODE + "```"
    return [llm.chat(chat(edit), params)]


def quoting(llm: LLM, tokens: int, turn: int) -> list[Completion]:  # noqa: ARG001
    ask = "Quote, word for word, all sentences of the text about the mill.\n\n" + PASSAGES
    return [llm.chat(chat(ask), SamplingParams(temperature=0.0, max_tokens=tokens))]


def agent_json(llm: LLM, tokens: int, turn: int) -> list[Completion]:
    params = SamplingParams(temperature=0.0, max_tokens=min(tokens, 80))
    place = PLACES[turn % len(PLACES)]
    return [llm.chat(chat(f"{TOOL}The task: find {what} in {place}"), params) for what in WANTED]


def open_chat(llm: LLM, tokens: int, turn: int) -> list[Completion]:  # noqa: ARG001
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=tokens)
    return [llm.chat(chat(text), params) for text in TALK[:2]]


def batch_16(llm: LLM, tokens: int, turn: int) -> list[Completion]:  # noqa: ARG001
    params = SamplingParams(temperature=0.7, max_tokens=min(tokens, 60))
    handles = [llm.submit(chat(text), params.replace(seed=seed)) for seed in range(4) for text in TALK]
    return [handle.result() for handle in handles]


CASES = {
    "code-edit": (code_edit, "auto"),
    "quoting": (quoting, "auto"),
    "agent-json": (agent_json, "auto,suffix"),
    "open-chat": (open_chat, "auto"),
    "batch-16": (batch_16, "auto"),
}


def measure(model: str, name: str, rounds: int, tokens: int) -> dict[str, Any]:
    """Medians of some rounds, after one of each that fills caches and learns."""
    ask, methods = CASES[name]
    with LLM(model, config=config("off")) as off, LLM(model, config=config(methods)) as on:
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(rounds + 1):
            answers = []
            for is_on, llm in ((False, off), (True, on)):
                started = time.process_time()
                answers.append(ask(llm, tokens, turn))
                seconds[is_on].append(time.process_time() - started)
            assert said(answers[0]) == said(answers[1]), f"{name}: the answers differ"
        stats, isa, num_tokens = on.stats(), on.isa, sum(len(one.token_ids) for one in answers[0])
    ratios = [a / b for a, b in zip(seconds[False][1:], seconds[True][1:], strict=True)]
    return {
        "speedup": round(median(ratios), 3),
        "speedups": [round(ratio, 3) for ratio in ratios],
        "first_round": round(seconds[False][0] / seconds[True][0], 3),
        "tokens": num_tokens,
        "drafted": stats.draft_tokens,
        "accepted": sum(stats.accepted_per_position),
        "isa": isa,
    }


def said(answers: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


def config(speculation: str) -> EngineConfig:
    return EngineConfig(threads=1, context=2048, speculation=speculation)


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
        command = f"python -m benchmarks.speculation MODEL --rounds {arguments.rounds} --tokens {arguments.tokens}"
        write_result(arguments.write, found, command=command)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
