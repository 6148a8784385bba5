"""The child process of document_reader.py: a script, run with `python -I`, never imported by Kvarn.

Reads a file such as a PDF, or HTML pages as a JSON list, from stdin; writes a status byte and the text, the JSON list
of texts, or the reason why there is none to stdout. A hostile file can exhaust its time or memory; then only this
process ends.

    python -I document_reader_child.py SYS_PATH_AS_JSON KIND MAX_PAGES MAX_CHARS MEMORY_BYTES CPU_S
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress

OK, FAILED = b"\0", b"\1"
NICENESS = 10  # engines on the same cores come first
SOURCE = "file"  # stands for the name, which the parent knows


def main() -> None:
    """Parse one document, or the pages of one request."""
    paths, kind, *numbers = sys.argv[1:]
    max_pages, max_chars, memory_bytes, cpu_s = map(int, numbers)
    sys.path[:] = json.loads(paths)
    from kvarn.errors import KvarnError

    try:
        parse = parser_of(kind, max_pages, max_chars)
        limit(memory_bytes, cpu_s)  # after the imports, which need memory too
        status, output = OK, parse(sys.stdin.buffer.read())
    except MemoryError:
        status, output = FAILED, "needs too much memory to be read; split it, or save it anew"
    except KvarnError as error:
        status, output = FAILED, str(error).removeprefix(f"{SOURCE}: ")
    sys.stdout.buffer.write(status + output.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


def parser_of(kind: str, max_pages: int, max_chars: int) -> Callable[[bytes], str]:
    """What reads a kind of file; of HTML several pages."""
    if kind == "html":
        from kvarn.retrieval.ingest.readers.html import html_to_text

        return lambda data: json.dumps([html_to_text(page) for page in json.loads(data)])
    if kind == "pdf":
        from kvarn.retrieval.extras import require
        from kvarn.retrieval.ingest.readers.pdf import PdfLimits, pdf_to_text

        require("pypdf")
        return lambda data: pdf_to_text(data, SOURCE, PdfLimits(max_pages, max_chars))
    from kvarn.retrieval.ingest.readers.docx import docx_to_text
    from kvarn.retrieval.ingest.readers.epub import epub_to_text
    from kvarn.retrieval.ingest.readers.notebook import notebook_to_text

    readers = {"docx": docx_to_text, "epub": epub_to_text, "notebook": notebook_to_text}
    return lambda data: readers[kind](data, SOURCE, max_chars)


def limit(memory_bytes: int, cpu_s: int) -> None:
    """Limit the CPU time, and the memory this process may map beyond what it has now."""
    try:
        import resource
    except ImportError:
        return  # not Unix: only the parent's deadline limits this process
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # At the first limit comes SIGXCPU, by which it ends; SIGKILL always comes from outside.
    with suppress(ValueError):  # where the system itself allows less, that holds
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
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
