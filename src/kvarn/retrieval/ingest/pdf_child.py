"""A process that reads documents of a stranger: a script, run with `python -I`, never imported by Kvarn.

A PDF, or HTML pages as a list in JSON, come on stdin; stdout gets a status byte and the text, or the list of texts, or
the reason why there is none. A hostile file can make it run out of time or memory; then this process ends, and nothing
else is touched.

    python -I pdf_child.py SYS_PATH_AS_JSON KIND MAX_PAGES MAX_CHARS MEMORY_BYTES CPU_S
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

OK, FAILED = b"\0", b"\1"
NICENESS = 10  # engines that share the processors come first
SOURCE = "file"  # the caller knows its name


def main() -> None:
    """Read what comes."""
    paths, kind, *numbers = sys.argv[1:]
    max_pages, max_chars, memory_bytes, cpu_s = map(int, numbers)
    sys.path[:] = json.loads(paths)
    from kvarn.errors import KvarnError

    try:
        parse = pages_parser() if kind == "html" else pdf_parser(max_pages, max_chars)
        limit(memory_bytes, cpu_s)  # everything is loaded before memory gets tight
        status, told = OK, parse(sys.stdin.buffer.read())
    except MemoryError:
        status, told = FAILED, "needs too much memory to be read; split it, or save it anew"
    except KvarnError as error:
        status, told = FAILED, str(error).removeprefix(f"{SOURCE}: ")
    sys.stdout.buffer.write(status + told.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


def pdf_parser(max_pages: int, max_chars: int) -> Callable[[bytes], str]:
    from kvarn.retrieval.extras import require
    from kvarn.retrieval.ingest.pdf import PdfLimits, pdf_to_text

    require("pypdf")
    return lambda data: pdf_to_text(data, SOURCE, PdfLimits(max_pages, max_chars))


def pages_parser() -> Callable[[bytes], str]:
    from kvarn.retrieval.ingest.html import html_to_text

    return lambda data: json.dumps([html_to_text(page) for page in json.loads(data)])


def limit(memory_bytes: int, cpu_s: int) -> None:
    """Bound the time of computing, and what this process may map beyond what it has now."""
    try:
        import resource

        os.nice(NICENESS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, mapped + memory_bytes))
    except (ImportError, OSError, ValueError):
        pass  # not Linux: the deadline alone protects, and the memory is this process's own


if __name__ == "__main__":
    main()
    os._exit(0)
