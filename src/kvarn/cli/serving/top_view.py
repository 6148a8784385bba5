"""One frame of /v1/live as a rich renderable. Knows the frame; not where it comes from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvarn.cli.terminal.text import printable
from kvarn.models.memory_plan import show_bytes

COLOURS = {"o": "green", "s": "cyan", "u": "yellow", "c": "blue", "f": "bright_black"}
WORDS = {"o": "yours", "s": "shared", "u": "others", "c": "cached", "f": "free"}
BARS = " ▁▂▃▄▅▆▇█"
MAX_ROWS = 6  # of the block map
NUM_STEPS = 60


def rendered(frame: Mapping[str, Any], width: int) -> RenderableType:
    """All models with their engines, then the caller's requests."""
    parts = [_model(model, max(20, width - 4)) for model in frame["models"]]
    return Group(*parts, _requests(frame["requests"]))


def _model(model: Mapping[str, Any], width: int) -> RenderableType:
    head = Text.assemble((_shown(model["id"]), "bold"), f"  {model['kind']}, {show_bytes(model['needed_bytes'])}")
    engine = model["engine"]
    if engine is None:
        head.append("  not loaded", "bright_black")
        return Padding(head, (0, 0, 1, 0))
    kv = engine["kv"]
    asked = max(1, engine["prefix_query_tokens"])
    figures = (
        f"{engine['tokens_per_s']:,.1f} tokens/s   "
        f"{engine['running']} running ({engine['others_running']} of others)   "
        f"{engine['waiting']} waiting ({engine['others_waiting']} of others)   "
        f"prefix hits {100 * engine['prefix_hit_tokens'] / asked:.0f}%   {engine['preemptions']} preemptions"
    )
    body = [head, Text(figures), _steps(engine["steps"])]
    if kv["num_blocks"]:
        body += [block_map(kv["map"], width), _legend(kv)]
    return Padding(Group(*body), (0, 0, 1, 0))


def _steps(steps: Sequence[Sequence[float]]) -> Text:
    """The rows of the last steps as bars: how much each of them computed."""
    rows = [int(prompt + generated) for _, _, prompt, generated, _ in steps[-NUM_STEPS:]]
    most = max(rows, default=1) or 1
    bars = "".join(BARS[min(8, -(-8 * row // most))] for row in rows)
    return Text.assemble(
        "steps ", (bars or "none since the last look", "green"), f"  at most {most} rows" if rows else ""
    )


def block_map(runs: str, width: int) -> Text:
    """The blocks in order; where there are more than letters, each stands for several and shows the most used state."""
    found = [(state, int(length)) for state, length in re.findall(r"([fcuso])(\d+)", runs)]
    total = sum(length for _, length in found)
    per_cell = max(1, -(-total // (width * MAX_ROWS)))
    cells, text = _cells(found, per_cell), Text()
    for number, state in enumerate(cells):
        text.append("\n" if number and number % width == 0 else "")
        text.append("·" if state == "f" else "■", COLOURS[state])
    return text


def _cells(runs: Sequence[tuple[str, int]], per_cell: int) -> list[str]:
    """The state of each cell: of the blocks in it, the first in use by the order of COLOURS."""
    order = list(COLOURS)
    cells: list[str] = []
    place = 0
    for state, length in runs:
        for cell in range(place // per_cell, (place + length - 1) // per_cell + 1):
            if cell == len(cells):
                cells.append(state)
            elif order.index(state) < order.index(cells[cell]):
                cells[cell] = state
        place += length
    return cells


def _legend(kv: Mapping[str, Any]) -> Text:
    own, shared, used = kv["own"], kv["shared"], kv["used"]
    counts = {"o": own, "s": shared, "u": used - own - shared, "c": kv["cached"], "f": kv["free"]}
    text = Text()
    for state, count in counts.items():
        text.append(f"■ {WORDS[state]} {count:,}   ", COLOURS[state])
    return text.append(f"of {kv['num_blocks']:,} blocks of {kv['block_size']} tokens", "bright_black")


def _requests(requests: Sequence[Mapping[str, Any]]) -> RenderableType:
    if not requests:
        return Text("no request of yours is running", "bright_black")
    table = Table("request", "model", "phase", "prompt", "cached", "answer", "elapsed", "deadline in", box=None)
    for one in requests:
        prompt = f"{one['prompt_tokens_computed']:,}/{one['prompt_tokens']:,}"
        times = f"{one['elapsed_s']:.1f} s", f"{one['deadline_s']:.0f} s"
        counts = f"{one['cached_tokens']:,}", f"{one['completion_tokens']:,}"
        table.add_row(one["id"][-12:], _shown(one["model"]), one["phase"], prompt, *counts, *times)
    return table


def _shown(text: str) -> str:
    return printable(text[:60])
