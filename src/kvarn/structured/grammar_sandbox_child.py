"""The process that tries a constraint first: a script, run with `python -I -S`, never imported by Kvarn.

A hostile schema or grammar can make llguidance run out of stack, memory or time. Then this process dies, and nothing
else is touched; what passes here is compiled again by the process that serves.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from typing import Any


def main() -> None:
    """Read one constraint from stdin, compile it, write what happened to stdout."""
    library = load(sys.argv[1])
    asked = json.loads(sys.stdin.buffer.read())
    limit(asked["memory_bytes"], asked["cpu_s"])
    threading.stack_size(asked["stack_bytes"])
    thread = threading.Thread(target=lambda: answer(library, asked))
    thread.start()
    thread.join()


def answer(library: Any, asked: dict[str, Any]) -> None:
    """Write the problem, if any, and the memory that the grammar took."""
    words = Bytes(asked)
    tokens = library.LLTokenizer(words, n_vocab=len(words.tokens), eos_token=asked["eos_ids"])
    any_json = library.LLMatcher.grammar_from_json_schema({"type": "object"})
    warm, _ = compiled(library, tokens, asked | {"grammar": any_json})  # what the first grammar pays for all others
    before = resident_bytes()
    matcher, problem = compiled(library, tokens, asked)
    sys.stdout.write(json.dumps({"problem": problem, "num_bytes": max(0, resident_bytes() - before)}))
    sys.stdout.flush()
    del warm, matcher


class Bytes:
    """A vocabulary of the model's control tokens and single bytes: all that compiling depends on."""

    is_tokenizer_wrapper = True

    def __init__(self, asked: dict[str, Any]) -> None:
        self.first_byte = asked["vocab_size"]
        self.tokens = [b""] * self.first_byte + [bytes([byte]) for byte in range(256)]
        self.special_token_ids = [int(token_id) for token_id in asked["special"]]
        for token_id, text in asked["special"].items():
            self.tokens[int(token_id)] = text.encode()
        self.eos_token_id = asked["eos_ids"][0]
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        return [self.first_byte + byte for byte in text.encode()]


def compiled(library: Any, tokens: Any, asked: dict[str, Any]) -> tuple[Any, str]:
    """A matcher of the grammar, and why it cannot be used; empty: it can."""
    try:
        limits = library.LLParserLimits(**asked["limits"])
        matcher = library.LLMatcher(tokens, asked["grammar"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher, str(matcher.get_error())
    except MemoryError:
        return None, "it needs too much memory"
    except BaseException as error:  # a panic of the library derives from BaseException
        return None, str(error) or type(error).__name__


def load(path: str) -> Any:
    """Load llguidance's native part alone: its package imports much more."""
    spec = importlib.util.spec_from_file_location("llguidance._lib", path)
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    return library


def limit(memory_bytes: int, cpu_s: int) -> None:
    """Bound what this process may map beyond what it has, and its time on a processor; leave no core file.

    Whoever computes an answer goes first.
    """
    try:
        import resource

        used_s = sum(os.times()[:2])
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (int(used_s) + cpu_s, int(used_s) + cpu_s))
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, mapped + memory_bytes))
        os.nice(10)
    except (ImportError, OSError, ValueError):
        pass  # not Linux: the caller's deadline alone protects, and the memory is this process's own


def resident_bytes() -> int:
    """What this process holds in memory; 0 where that is not known."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0


if __name__ == "__main__":
    main()
    os._exit(0)
