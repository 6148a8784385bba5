"""Constraints compiled for one vocabulary, in the caller's thread: bounded in time, concurrency and cached bytes.

llguidance is imported with the first constraint, and the vocabulary is laid out for it then.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvarn.errors import CapacityError, ConstraintError
from kvarn.observe.histogram import SECONDS, Histogram, HistogramSnapshot
from kvarn.sampling.token_masks import UInt32
from kvarn.structured.constraints import Constraint, Grammar, JsonSchema
from kvarn.structured.grammar_sandbox import SandboxLimits, SandboxVocabulary, compile_in_sandbox
from kvarn.structured.matcher import GrammarMatcher, explain
from kvarn.structured.slot_matcher import SlotMatcher
from kvarn.structured.token_table import GrammarTokenizer, TokenTable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILING = 3
MAX_CACHED_BYTES = 64 << 20
MAX_REFUSED = 256  # constraints that could not be compiled, remembered
MIN_BYTES = 64 << 10  # least size that a compiled grammar is counted with: the lexer grows with use ...
BYTES_PER_CHARACTER = 64  # ... and small growth is not always seen
# Small models tend to write whitespace without end where JSON allows it.
JSON_DEFAULTS: dict[str, Any] = {"whitespace_pattern": r"[ \n\t]{1,32}"}
JSON_OVERRIDES: dict[str, Any] = {"lenient": False}  # a keyword that cannot be enforced is refused, never ignored


@dataclass(frozen=True, slots=True)
class CompilerLimits:
    """Limits of compiling and caching constraints."""

    sandbox: SandboxLimits = field(default_factory=SandboxLimits)
    max_compiling: int = MAX_COMPILING
    wait_s: float = 20.0  # for a free compile slot
    cached_bytes: int = MAX_CACHED_BYTES


@dataclass(frozen=True, slots=True)
class CompiledConstraint:
    """A constraint ready to use; every answer starts its own matcher."""

    start: LLMatcher
    trie: LLTokenizer
    allowed: UInt32  # mask of the ids that tokens have
    num_bytes: int
    source: Constraint
    single_ids: tuple[int, ...] = ()  # tokens of one byte, for ways to the end of a slot

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self.start, self.allowed)

    def slot_matcher(self) -> SlotMatcher:
        return SlotMatcher(self.start, self.allowed, np.array(self.single_ids, np.int64), self.trie)


class ConstraintCompiler:
    """Compiles constraints and caches them; safe to use from several threads."""

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int, limits: CompilerLimits | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = limits or CompilerLimits()
        self._cache: OrderedDict[Constraint, CompiledConstraint] = OrderedDict()  # the least recently used first
        self._cached_bytes = 0
        self._table: TokenTable | None = None
        self._compile_times = Histogram(SECONDS)
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # digests, and why; the oldest first
        self._num_reused = 0
        self._lock = threading.Lock()
        self._table_lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(self._limits.max_compiling)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the cached constraints, as measured when they were compiled."""
        return self._cached_bytes

    @property
    def compile_times(self) -> HistogramSnapshot:
        """Seconds of each compilation, successful or not."""
        with self._lock:
            return self._compile_times.snapshot()

    @property
    def num_reused(self) -> int:
        """Cache hits."""
        return self._num_reused

    def compile(self, constraint: Constraint, ended: threading.Event | None = None) -> CompiledConstraint:
        """Return a constraint ready to use, or raise ConstraintError saying why it cannot be.

        ended: set when nobody waits for it any more; then it is Cancelled.
        """
        found = self.find(constraint)
        if found is not None:
            return found
        if not self._slots.acquire(timeout=self._limits.wait_s):
            raise CapacityError("too many constraints are being compiled; try again", retry_after_s=1.0)
        try:
            found = self.find(constraint)  # another thread may have compiled it meanwhile
            return found if found is not None else self._store(constraint, self._compile_timed(constraint, ended))
        finally:
            self._slots.release()

    def find(self, constraint: Constraint) -> CompiledConstraint | None:
        """A constraint that was compiled before; ConstraintError if that could not be done; None: not known yet."""
        with self._lock:
            found = self._cache.get(constraint)
            if found is not None:
                self._cache.move_to_end(constraint)
                self._num_reused += 1
            elif (reason := self._refused.get(_digest(constraint))) is not None:
                raise ConstraintError(reason)
            return found

    def _compile_timed(self, constraint: Constraint, ended: threading.Event | None) -> CompiledConstraint:
        started = time.perf_counter()
        try:
            return self._compile(constraint, ended)
        except ConstraintError as error:
            self._refuse(constraint, error)
            raise
        finally:
            with self._lock:
                self._compile_times.observe(time.perf_counter() - started)

    def _refuse(self, constraint: Constraint, error: ConstraintError) -> None:
        """Remember what cannot be compiled: finding that out takes as long as compiling."""
        with self._lock:
            self._refused[_digest(constraint)] = str(error)
            while len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)

    def _store(self, constraint: Constraint, compiled: CompiledConstraint) -> CompiledConstraint:
        with self._lock:
            self._cache[constraint] = compiled
            self._cached_bytes += compiled.num_bytes
            while self._cached_bytes > self._limits.cached_bytes:
                _, dropped = self._cache.popitem(last=False)
                self._cached_bytes -= dropped.num_bytes
        return compiled

    def compile_again(self, constraint: Constraint) -> CompiledConstraint:
        """The same for one that another process of this program has compiled: it was found to be safe there."""
        found = self.find(constraint)
        return found if found is not None else self._store(constraint, self._compile(constraint, None, is_known=True))

    def _compile(
        self, constraint: Constraint, ended: threading.Event | None, *, is_known: bool = False
    ) -> CompiledConstraint:
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = _grammar(constraint)
        except ValueError as error:
            raise ConstraintError(f"the constraint cannot be used: {explain(str(error))}") from error
        tokens = self._tokens()
        vocabulary = SandboxVocabulary(self._vocab_size, tokens.eos_ids, tokens.special)
        num_bytes = 0 if is_known else compile_in_sandbox(grammar, vocabulary, self._limits.sandbox, ended)
        limits = LLParserLimits(**asdict(self._limits.sandbox.parser))
        start = LLMatcher(tokens.trie, grammar, log_level=0, limits=limits)
        if start.is_error():
            raise ConstraintError(f"the constraint cannot be used: {explain(start.get_error())}")
        size = MIN_BYTES + max(num_bytes, BYTES_PER_CHARACTER * len(constraint.text))
        compiled = CompiledConstraint(start, tokens.trie, tokens.allowed, size, constraint, tokens.single_ids)
        first = compiled.matcher()
        first.mask_after((), 0)
        if first.error is not None:
            raise first.error
        return compiled

    def _tokens(self) -> TokenTable:
        with self._table_lock:
            if self._table is None:
                self._table = TokenTable(self._tokenizer, self._vocab_size)
            return self._table


def _digest(constraint: Constraint) -> bytes:
    return hashlib.sha256(f"{type(constraint).__name__} {constraint.text}".encode()).digest()


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    if isinstance(constraint, Grammar):
        return LLMatcher.grammar_from_lark(constraint.lark)
    if isinstance(constraint, JsonSchema):
        return LLMatcher.grammar_from_json_schema(constraint.text, JSON_DEFAULTS, JSON_OVERRIDES)  # type: ignore[arg-type]
    return LLMatcher.grammar_from_regex(constraint.pattern)
