"""Compile a grammar in a child process first, under kernel limits, before it is compiled in this one.

llguidance bounds most of its work, but not its stack (a chain of 10,000 rules) nor all of its memory and time (a
multipleOf of 10,000,019): found by experiment, see docs/LOG.md. The kernel's limits on the child bound all of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kvarn.errors import CapacityError, ConstraintError
from kvarn.structured.matcher import NOTHING_MAY_FOLLOW, explain


@dataclass(frozen=True, slots=True)
class ParserLimits:
    """llguidance's own limits, for compiling and for each token's mask; see its LLParserLimits."""

    initial_lexer_fuel: int = 100_000  # an enum of 5,000 strings; masks of a{1000000000} end after 30 ms, not 800
    step_lexer_fuel: int = 100_000
    step_max_items: int = 25_000
    max_lexer_states: int = 50_000  # about 1.5 KiB each
    max_grammar_size: int = 200_000
    verbose_errors: bool = False


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Resource limits of the child process."""

    cpu_s: int = 2
    timeout_s: float = 20.0  # wall clock, process start included: long, as a busy machine is no fault of the grammar
    memory_bytes: int = 256 << 20
    stack_bytes: int = 1 << 20  # threads that compile and match afterwards have more


@dataclass(frozen=True, slots=True)
class SandboxVocabulary:
    """The part of a vocabulary that compiling depends on: the tokens a grammar may name."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    special: Mapping[int, str]


def compile_in_sandbox(grammar: str, vocabulary: SandboxVocabulary, parser: ParserLimits, limits: SandboxLimits) -> int:
    """Compile a grammar in a child process; the bytes it took there, or ConstraintError."""
    job = asdict(limits) | asdict(vocabulary) | {"grammar": grammar, "limits": asdict(parser)}
    script = Path(__file__).with_name("grammar_sandbox_child.py")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-B", str(script), _library()],
            input=json.dumps(job).encode("utf-8"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limits.timeout_s,
            check=False,
            start_new_session=True,  # Ctrl-C in a terminal must not reach it
        )
    except subprocess.TimeoutExpired:
        # The child limits its own CPU time: this one did not get any.
        message = f"the machine is too busy: the constraint was not compiled within {limits.timeout_s:g} s; try again"
        raise CapacityError(message, retry_after_s=1.0) from None
    except OSError as error:
        raise CapacityError(f"no process could be started to try the constraint: {error}", retry_after_s=1.0) from error
    if done.returncode != 0:
        raise ConstraintError(
            f"the constraint is too complex: compiling it takes more than {limits.cpu_s} s, "
            f"{limits.memory_bytes >> 20} MiB or nests too deeply; simplify it"
        )
    result = json.loads(done.stdout)
    problem = explain(result["problem"])
    if problem == NOTHING_MAY_FOLLOW:
        raise ConstraintError("the constraint allows no text at all; look for contradictions in it")
    if problem:
        raise ConstraintError(f"the constraint cannot be used: {problem}")
    return int(result["num_bytes"])


@cache
def _library() -> str:
    """The path of llguidance's native module."""
    spec = find_spec("llguidance._lib")
    if spec is None or spec.origin is None:
        raise ConstraintError("the package llguidance is not installed; constraints need it: pip install llguidance")
    return spec.origin
