"""Compile a grammar in a child process first, under kernel limits, before it is compiled in this one.

llguidance bounds most of its work, but not its stack (a chain of 10,000 rules) nor all of its memory and time (a
multipleOf of 10,000,019): found by experiment, see docs/LOG.md. The kernel's limits on the child bound all of it.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kvarn.child_process import retried, run_child
from kvarn.errors import ConstraintError
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
    parser: ParserLimits = field(default_factory=ParserLimits)


@dataclass(frozen=True, slots=True)
class SandboxVocabulary:
    """The part of a vocabulary that compiling depends on: the tokens a grammar may name."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    special: Mapping[int, str]


def compile_in_sandbox(
    grammar: str, vocabulary: SandboxVocabulary, limits: SandboxLimits, ended: threading.Event | None = None
) -> int:
    """Compile a grammar in a child process; the bytes it took there, or ConstraintError. Cancelled once ended is set.

    A child that was killed or stopped is no fault of the grammar: another one tries.
    """
    job = asdict(limits) | asdict(vocabulary) | {"grammar": grammar}
    script = Path(__file__).with_name("grammar_sandbox_child.py")
    command = [sys.executable, "-I", "-S", "-B", str(script), _library()]
    data = json.dumps(job).encode("utf-8")
    returncode, output = retried(lambda: run_child(command, data, limits.timeout_s, ended))
    if returncode != 0:
        raise ConstraintError(
            f"the constraint is too complex: compiling it takes more than {limits.cpu_s} s, "
            f"{limits.memory_bytes >> 20} MiB or nests too deeply; simplify it"
        )
    result = json.loads(output)
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
