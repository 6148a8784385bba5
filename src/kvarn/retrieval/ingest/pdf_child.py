"""A process that reads one PDF of a stranger: a script, run with `python -I`, never imported by Kvarn.

The file comes on stdin; stdout gets a status byte and the text, or the reason why there is none. A hostile file can
make it run out of time or memory; then this process ends, and nothing else is touched.

    python -I pdf_child.py SYS_PATH_AS_JSON MAX_PAGES MAX_CHARS MEMORY_BYTES CPU_S
"""

from __future__ import annotations

import json
import os
import sys

OK, FAILED = b"\0", b"\1"
SOURCE = "PDF"  # the caller knows its name


def main() -> None:
    """Read one file."""
    paths, *numbers = sys.argv[1:]
    max_pages, max_chars, memory_bytes, cpu_s = map(int, numbers)
    sys.path[:] = json.loads(paths)
    status, told = read(max_pages, max_chars, memory_bytes, cpu_s)
    sys.stdout.buffer.write(status + told.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


def read(max_pages: int, max_chars: int, memory_bytes: int, cpu_s: int) -> tuple[bytes, str]:
    """The status, and the text or the reason."""
    from kvarn.errors import KvarnError
    from kvarn.retrieval.extras import require
    from kvarn.retrieval.ingest.pdf import PdfLimits, pdf_to_text

    try:
        require("pypdf")  # everything is loaded before memory gets tight
        limit(memory_bytes, cpu_s)
        return OK, pdf_to_text(sys.stdin.buffer.read(), SOURCE, PdfLimits(max_pages, max_chars))
    except MemoryError:
        return FAILED, "needs too much memory to be read; split it, or save it anew"
    except KvarnError as error:
        return FAILED, str(error).removeprefix(f"{SOURCE}: ")


def limit(memory_bytes: int, cpu_s: int) -> None:
    """Bound the time of computing, and what this process may map beyond what it has now."""
    try:
        import resource

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
