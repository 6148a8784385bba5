"""Try the tokenizer of a folder in a child process, under kernel limits, before it is built in this one.

A tokenizer.json is a program: replacements that feed each other make terabytes of a letter, patterns backtrack for
hours or make the tokenizers package panic. How much text may grow is also bounded here, by looking at the replacements.
"""

from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvarn.checks import short
from kvarn.errors import CapacityError, FormatError

MAX_GROWTH = 32  # times as many characters; U+FDFA becomes 18 in the standard's own normalisation
MAX_COMPONENTS = 128
_NESTED = ("normalizers", "pretokenizers")  # keys of components that hold others
_WIDEST = 18  # characters that Unicode's NFKC makes of one


@dataclass(frozen=True, slots=True)
class TokenizerLimits:
    """Resource limits of the child process."""

    cpu_s: int = 60  # to build it and for all probes; 262,000 tokens take two seconds
    probe_cpu_s: float = 1.0  # for each probe of a few thousand characters
    timeout_s: float = 300.0  # wall clock: long, as a busy machine is no fault of the file
    memory_bytes: int = 256 << 20
    memory_per_byte: int = 40  # of tokenizer.json; measured: 12
    max_growth: int = MAX_GROWTH


def try_tokenizer(tokenizer_json: Mapping[str, Any], limits: TokenizerLimits | None = None) -> str:
    """Build a tokenizer in a child process and give it texts; FormatError where it may not be built in this one.

    Returns tokenizer_json as the text that was tried.
    """
    limits = limits or TokenizerLimits()
    components = list(_components(tokenizer_json))
    _check_growth(components)
    written = json.dumps(tokenizer_json)
    text = written.encode()
    memory_bytes = limits.memory_bytes + limits.memory_per_byte * len(text)
    job = asdict(limits) | {"memory_bytes": memory_bytes, "alphabet": _alphabet(components)}
    result = _run(json.dumps(job).encode() + b"\n" + text, limits)
    if result["problem"]:
        message = f"the tokenizer cannot be used: {result['problem']}; get the model again"
        raise FormatError(message, file="tokenizer.json")
    return written


def _run(job: bytes, limits: TokenizerLimits) -> dict[str, Any]:
    spec = find_spec("tokenizers")
    assert spec is not None
    assert spec.origin is not None
    script, packages = Path(__file__).with_name("folder_sandbox_child.py"), Path(spec.origin).parent.parent
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-B", str(script), str(packages)],
            input=job,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limits.timeout_s,
            check=False,
            start_new_session=True,  # Ctrl-C in a terminal must not reach it
        )
    except subprocess.TimeoutExpired:
        message = f"the machine is too busy: the tokenizer was not tried within {limits.timeout_s:g} s; load it again"
        raise CapacityError(message, retry_after_s=1.0) from None
    except OSError as error:
        raise CapacityError(f"no process could be started to try the tokenizer: {error}", retry_after_s=1.0) from error
    if done.returncode != 0:
        problem = "building and trying it takes too much memory or time"
        return {"problem": f"{problem} (its process ended with {done.returncode})"}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _components(tokenizer_json: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parts of the normaliser, then those of the pre-tokeniser, in order."""
    waiting = [tokenizer_json.get(name) for name in ("pre_tokenizer", "normalizer")]
    count = 0
    while waiting:
        component = waiting.pop()
        if not isinstance(component, dict):
            continue
        inner = [part for key in _NESTED if isinstance(component.get(key), list) for part in component[key]]
        waiting.extend(reversed(inner))
        count += 1
        if count > MAX_COMPONENTS or len(waiting) > MAX_COMPONENTS:
            raise FormatError(f"more than {MAX_COMPONENTS} steps of normalisation", file="tokenizer.json")
        if not inner:
            yield component


def _check_growth(components: list[Mapping[str, Any]]) -> None:
    """Refuse replacements that, one after the other, make much text of little."""
    growth = math.prod(_growth(component) for component in components)
    if growth > MAX_GROWTH:
        raise FormatError(
            f"its replacements make {growth:,.0f} characters of one; at most {MAX_GROWTH} are allowed",
            file="tokenizer.json",
        )


def _growth(component: Mapping[str, Any]) -> float:
    """How many characters one character may become, at least 1."""
    kind = component.get("type")
    if kind == "Replace":
        return max(1.0, len(_text(component, "content")) / max(1, len(_literal(component) or "")))
    if kind == "Prepend":
        return max(1.0, len(_text(component, "prepend")) / 2)
    if kind == "Precompiled":
        return max(1.0, _longest_entry(component) / _WIDEST)
    return 1.0


def _longest_entry(component: Mapping[str, Any]) -> int:
    """Characters of the longest replacement of a compiled table: a length, a trie, texts that end with NUL."""
    try:
        table = base64.b64decode(_text(component, "precompiled_charsmap"), validate=True)
    except ValueError:
        raise FormatError("precompiled_charsmap is not base64", file="tokenizer.json") from None
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0"))


def _alphabet(components: list[Mapping[str, Any]]) -> str:
    """The characters that patterns speak of, for probes."""
    patterns = [_pattern(component) for component in components]
    return "".join(dict.fromkeys("".join(patterns)))[:64]


def _literal(component: Mapping[str, Any]) -> str | None:
    pattern = component.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    return text if isinstance(text, str) else None


def _pattern(component: Mapping[str, Any]) -> str:
    pattern = component.get("pattern")
    texts = pattern.values() if isinstance(pattern, dict) else ()
    return "".join(text for text in texts if isinstance(text, str))


def _text(component: Mapping[str, Any], key: str) -> str:
    value = component.get(key)
    if not isinstance(value, str):
        raise FormatError(f"{key} is {short(value)}; expected a text", file="tokenizer.json")
    return value
