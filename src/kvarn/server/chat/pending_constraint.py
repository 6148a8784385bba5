"""A constraint that is not compiled yet: that takes time, so the request is counted and has its turn first.

make_plan: found(), what was compiled before ─> reserve ─> compiled(), in a thread of those that keys share
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from kvarn.server.api.schema import field_at_fault
from kvarn.server.chat.output.lazy_grammar import Compile

if TYPE_CHECKING:
    from kvarn.engine.submission import Submission
    from kvarn.structured.compiler import CompiledConstraint, ConstraintCompiler
    from kvarn.structured.constraints import Compiled, Constraint, Matcher


@dataclass(frozen=True, slots=True)
class PendingConstraint:
    """In a submission, until its turn has come."""

    make: Callable[[Compile], Compiled | None]
    field: str | None  # that asks for it

    def matcher(self) -> Matcher:
        raise AssertionError("the constraint was not compiled before it was submitted")

    def compiled(self, compile: Compile) -> Compiled | None:
        """Ready to use, or ConstraintRefused naming the field."""
        with field_at_fault(self.field):
            return self.make(compile)


class _NotFoundError(Exception):
    """It was never compiled."""


def found(submissions: Iterable[Submission], compiler: ConstraintCompiler) -> tuple[Submission, ...]:
    """With the constraints that were compiled before; one that was refused before is refused."""

    def find(constraint: Constraint) -> CompiledConstraint:
        if (one := compiler.find(constraint)) is None:
            raise _NotFoundError
        return one

    try:
        return compiled(submissions, find)
    except _NotFoundError:
        return tuple(submissions)


def compiled(submissions: Iterable[Submission], compile: Compile) -> tuple[Submission, ...]:
    """With all constraints ready; one that several prompts share is compiled once, however large."""
    once = cache(compile)
    return tuple(
        replace(one, constraint=one.constraint.compiled(once)) if isinstance(one.constraint, PendingConstraint) else one
        for one in submissions
    )
