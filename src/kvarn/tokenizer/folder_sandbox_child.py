"""The child process that tries the tokenizer of a folder: a script, run with `python -I -S`, never imported by Kvarn.

A hostile tokenizer.json can make the tokenizers package run out of memory, time or stack, or panic. Then only this
process ends; what passes here is built again by the process that serves.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from itertools import pairwise
from typing import Any

RUN = 1000  # characters of a probe, at least
SAMPLE = "The 3 quick brown foxes' naïve café\t— „jumps“ over 1,234.56 lazy dogs!\r\n\n  日本語 한국어 ﷺ 🙂 'll "


def main() -> None:
    """Read a job and a tokenizer.json from stdin, write what is wrong with it to stdout."""
    sys.path.append(sys.argv[1])
    from tokenizers import Tokenizer

    line, _, text = sys.stdin.buffer.read().partition(b"\n")
    job = json.loads(line)
    limit_resources(job["memory_bytes"], job["cpu_s"])
    sys.stdout.write(json.dumps({"problem": problem_of(Tokenizer, text.decode(), job)}))
    sys.stdout.flush()


def problem_of(tokenizer_class: Any, text: str, job: dict[str, Any]) -> str:
    """Why a tokenizer cannot be used; empty: it can."""
    try:
        tokenizer = tokenizer_class.from_str(text)
        for probe in probes(job["alphabet"]):
            problem = try_probe(tokenizer, probe, job)
            if problem:
                return problem
    except MemoryError:
        return "it needs too much memory"
    except BaseException as error:  # a panic of the package derives from BaseException
        return str(error)[:200] or type(error).__name__
    return ""


def probes(alphabet: str) -> list[str]:
    """Texts in which patterns are slow or replacements many: runs of one character, and the same with another end."""
    letters = "".join(dict.fromkeys("aZ1 \n'-.é日" + alphabet))
    ending = "".join(letter * 3 for letter in letters)  # what a pattern looks for before it tries a run at all
    runs = [letter * RUN for letter in letters]
    runs += [pair * (RUN // 2) for pair in map("".join, pairwise(letters))]
    runs += ["ab " * (RUN // 3), "ab\n12, " * (RUN // 7), SAMPLE * (RUN // len(SAMPLE))]
    return [SAMPLE, *runs, *(run + ending + run for run in runs)]


def try_probe(tokenizer: Any, probe: str, job: dict[str, Any]) -> str:
    """Why a tokenizer is too slow or too talkative for one text; empty: it is not."""
    before = time.process_time()
    if tokenizer.normalizer is not None:
        grown = len(tokenizer.normalizer.normalize_str(probe[:64])) / len(probe[:64])
        if grown > job["max_growth"]:
            return f"it makes {grown:,.0f} characters of one"
    num_tokens = len(tokenizer.encode(probe, add_special_tokens=False).ids)
    taken_s = time.process_time() - before
    if num_tokens > 4 * job["max_growth"] * len(probe):
        return f"it makes {num_tokens:,} tokens of {len(probe):,} characters"
    if taken_s > job["probe_cpu_s"]:
        return f"it takes {taken_s:.1f} s for {len(probe):,} characters such as {probe[:4]!r}"
    return ""


def limit_resources(memory_bytes: int, cpu_s: int) -> None:
    """Bound the memory that this process may still map and its CPU time; write no core file."""
    try:
        import resource
    except ImportError:
        return  # not Unix: the caller's deadline alone protects, and the memory is this process's own
    most_s = int(sum(os.times()[:2])) + cpu_s
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError):  # where the system itself allows less, that holds
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
    if sys.platform == "linux":  # others do not hold to it
        most = mapped_bytes() + memory_bytes
        with suppress(ValueError):  # likewise
            resource.setrlimit(resource.RLIMIT_AS, (most, most))


def mapped_bytes() -> int:
    """What this process has mapped; taken for a gigabyte where /proc does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 30


if __name__ == "__main__":
    main()
    os._exit(0)
