"""The helper process that renders chat templates: a script, run with `python -I -S`, never imported by Kvarn.

It reads requests from stdin and writes responses to stdout (see template_worker.py for the frames). A hostile template
can make it run out of fuel, time or memory; then this process fails or is killed, and nothing else is affected.
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

MAX_OUTPUT_BYTES = 16 << 20
MAX_INDENT = 16
OK, FAILED = b"\0", b"\1"


def main() -> None:
    """Serve requests until stdin ends."""
    packages, memory_bytes, fuel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sys.path.append(packages)
    environment = make_environment(fuel)
    environment.render_str("{{ 1 }}")  # everything lazy is loaded before memory gets tight
    limit_memory(memory_bytes)
    write_response(OK, b"")  # ready
    while (request := read_frame()) is not None:
        write_response(*render(environment, request))


def render(environment: Any, request: bytes) -> tuple[bytes, bytes]:
    """Return the status and the rendered text, or the reason why there is none."""
    try:
        parsed = json.loads(request)
        template = without_generation_tags(parsed["template"])
        text = environment.render_str(template, **parsed["context"]).encode("utf-8")
    except MemoryError:
        return FAILED, b"it needs too much memory"
    except BaseException as error:  # a panic of the engine derives from BaseException
        return FAILED, reason(error).encode("utf-8", "replace")
    if len(text) > MAX_OUTPUT_BYTES:
        return FAILED, f"it wrote {len(text):,} bytes, at most {MAX_OUTPUT_BYTES:,} are allowed".encode()
    return OK, text


def make_environment(fuel: int) -> Any:
    """Return an environment that behaves like the jinja2 one templates are written for."""
    from minijinja import Environment

    return Environment(
        fuel=fuel,
        debug=False,
        trim_blocks=True,
        lstrip_blocks=True,
        pycompat=True,
        auto_escape_callback=lambda _name: False,
        filters={"tojson": to_json, "length": length, "count": length},
        globals={"raise_exception": raise_exception, "strftime_now": strftime_now},
        finalizer=python_str,
    )


def without_generation_tags(template: str) -> str:
    """Replace {% generation %}, which only marks what to train on, by a block that does nothing."""
    if "generation" not in template:
        return template
    template = re.sub(r"\{%([-+]?)\s*generation\s*([-+]?)%\}", r"{%\1 with \2%}", template)
    return re.sub(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}", r"{%\1 endwith \2%}", template)


def length(value: Any) -> int:
    """Return the number of items; of something undefined 0, as in jinja2."""
    return 0 if value is None else len(value)


def raise_exception(message: str) -> NoReturn:
    """Let a template refuse a conversation."""
    raise ValueError(f"the template refused the conversation: {message}")


def strftime_now(pattern: str) -> str:
    """Return the local time in the format the template gives."""
    return datetime.now().strftime(str(pattern)[:200])


def to_json(
    value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False, ensure_ascii: bool = False
) -> str:
    """Return JSON as transformers' filter writes it: no HTML escapes, any character as itself."""
    if indent is not None and not 0 <= indent <= MAX_INDENT:
        raise ValueError(f"tojson: indent is {indent}, 0 to {MAX_INDENT} are allowed")
    marks = tuple(separators) if separators is not None else None
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=marks, sort_keys=sort_keys)


def python_str(value: Any) -> Any:
    """Write booleans and containers as Python does; minijinja would write true."""
    return str(value) if isinstance(value, (bool, list, dict, tuple)) else NotImplemented


def reason(error: BaseException) -> str:
    """Return one line about an error, without the template's text."""
    cause = error.__cause__ if isinstance(error.__cause__, ValueError) else error
    return str(cause).partition("\n")[0][:400]


def limit_memory(more_bytes: int) -> None:
    """Bound what this process may map beyond what it has now; no core file when that aborts it."""
    try:
        import resource
    except ImportError:
        return  # not Unix: the deadline alone protects, and the memory is this process's own
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # others do not hold to it
        most = mapped_bytes() + more_bytes
        with suppress(ValueError):  # where the system itself allows less, that holds
            resource.setrlimit(resource.RLIMIT_AS, (most, most))


def mapped_bytes() -> int:
    """What this process has mapped; taken for a gigabyte where /proc does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 30


def read_frame() -> bytes | None:
    """Return the next request, or None at the end."""
    head = sys.stdin.buffer.read(4)
    return sys.stdin.buffer.read(int.from_bytes(head, "little")) if len(head) == 4 else None


def write_response(status: bytes, body: bytes) -> None:
    """Write one response."""
    sys.stdout.buffer.write(status + len(body).to_bytes(4, "little") + body)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
    os._exit(0)
