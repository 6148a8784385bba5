"""The child process that compiles a constraint first: a script, run with `python -I -S`, never imported by Kvarn.

A hostile schema or grammar can make llguidance run out of stack, memory or time. Then only this process
dies; what passes here is compiled again by the process that serves.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from contextlib import suppress
from typing import Any


def main() -> None:
    """Read one job from stdin, compile its grammar, write the result to stdout."""
    library = load_library(sys.argv[1])
    job = json.loads(sys.stdin.buffer.read())
    limit_resources(job["memory_bytes"], job["cpu_s"])
    threading.stack_size(job["stack_bytes"])
    thread = threading.Thread(target=lambda: run_job(library, job))
    thread.start()
    thread.join()


def run_job(library: Any, job: dict[str, Any]) -> None:
    """Write the problem, if any, and the memory that the grammar took."""
    vocabulary = ByteVocabulary(job)
    tokens = library.LLTokenizer(vocabulary, n_vocab=len(vocabulary.tokens), eos_token=job["eos_ids"])
    any_json = library.LLMatcher.grammar_from_json_schema({"type": "object"})
    # The first grammar bears one-time costs, which are kept out of the measurement.
    warm, _ = compile_grammar(library, tokens, job | {"grammar": any_json})
    before = resident_bytes()
    matcher, problem = compile_grammar(library, tokens, job)
    sys.stdout.write(json.dumps({"problem": problem, "num_bytes": max(0, resident_bytes() - before)}))
    sys.stdout.flush()
    del warm, matcher


class ByteVocabulary:
    """A vocabulary of the model's control tokens and single bytes: all that compiling depends on."""

    is_tokenizer_wrapper = True

    def __init__(self, job: dict[str, Any]) -> None:
        self.first_byte = job["vocab_size"]
        self.tokens = [b""] * self.first_byte + [bytes([byte]) for byte in range(256)]
        self.special_token_ids = [int(token_id) for token_id in job["special"]]
        for token_id, text in job["special"].items():
            self.tokens[int(token_id)] = text.encode()
        self.eos_token_id = job["eos_ids"][0]
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        return [self.first_byte + byte for byte in text.encode()]


def compile_grammar(library: Any, tokens: Any, job: dict[str, Any]) -> tuple[Any, str]:
    """A matcher of the grammar, and why it cannot be used; empty: it can."""
    try:
        limits = library.LLParserLimits(**job["parser"])
        matcher = library.LLMatcher(tokens, job["grammar"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher, str(matcher.get_error())
    except MemoryError:
        return None, "it needs too much memory"
    except BaseException as error:  # a panic of the library derives from BaseException
        return None, str(error) or type(error).__name__


def load_library(path: str) -> Any:
    """Load llguidance's native part alone: its package imports much more."""
    spec = importlib.util.spec_from_file_location("llguidance._lib", path)
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    return library


def limit_resources(memory_bytes: int, cpu_s: int) -> None:
    """Bound the memory that this process may still map and its CPU time; write no core file.

    Runs at a low priority: processes that serve go first.
    """
    try:
        import resource
    except ImportError:
        return  # not Unix: the caller's deadline alone protects, and the memory is this process's own
    used_s = sum(os.times()[:2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # At the first limit comes SIGXCPU, by which it ends; SIGKILL always comes from outside.
    with suppress(ValueError):  # where the system itself allows less, that holds
        resource.setrlimit(resource.RLIMIT_CPU, (int(used_s) + cpu_s, int(used_s) + cpu_s + 1))
    if sys.platform == "linux":  # others do not hold to it
        most = mapped_bytes() + memory_bytes
        with suppress(ValueError):  # likewise
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.nice(10)


def mapped_bytes() -> int:
    """What this process has mapped; taken for a gigabyte where /proc does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 30


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
