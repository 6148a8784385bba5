"""Drafts beside what was chosen: rows for every drafted position, and the commit of those that were right.

Row i is sampled as the token would be chosen if the i drafts before it were: with their penalties, their place in the
grammar and the random numbers of its position. The first row whose token is another one ends the run, and that token
counts: what is committed is what one token at a time would have given, at any temperature.
"""

from __future__ import annotations

from kvarn.backends.batch import NO_TOKEN, Sampled
from kvarn.decoding.decoder import Commit, CommittedToken, Span, failed_commit
from kvarn.decoding.logprobs import sampled_logprob
from kvarn.decoding.sampling_state import SamplingState
from kvarn.errors import BackendError, BrokenScores
from kvarn.types import TokenLogprob


def commit_row(span: Span, state: SamplingState, token_id: int, sampled: Sampled, row: int) -> Commit:
    """Commit what a row of sampled says, and what the rows of drafts that turned out right say after it."""
    if token_id == NO_TOKEN:
        return Commit(span.request, 0, error=state.error or broken_logits(span))
    num_top = span.request.params.logprobs
    logprob = None if num_top is None else sampled_logprob(sampled, row, num_top)
    commit = commit_token(span, state, token_id, logprob)
    return commit if not span.num_drafts or commit.error is not None else _verified(span, state, commit, sampled, row)


def commit_token(span: Span, state: SamplingState, token_id: int, logprob: TokenLogprob | None) -> Commit:
    """Commit a sampled token, once the request's constraint has taken it."""
    try:
        ends_answer = state.accept_token(token_id)
    except BaseException as error:
        return failed_commit(span.request, f"the constraint failed on token {token_id}", error)
    return Commit(span.request, len(span.token_ids), (CommittedToken(token_id, logprob, ends_answer),))


def broken_logits(span: Span) -> BackendError:
    """Why nothing can be chosen."""
    return BrokenScores(
        f"the model's scores at position {span.end - span.num_drafts - 1:,} are not numbers; "
        "the model file may be damaged: fetch it again or try another quantisation"
    )


def _verified(span: Span, state: SamplingState, first: Commit, sampled: Sampled, row: int) -> Commit:
    """The commit of a span with drafts; first: that of its first choice, from this row of sampled."""
    drafts, num_top = span.token_ids[-span.num_drafts :], span.request.params.logprobs
    tokens = list(first.tokens)
    for offset, draft in enumerate(drafts, 1):
        if tokens[-1].ends_answer or tokens[-1].token_id != draft:
            break
        token_id = int(sampled.token_ids[row + offset])
        if token_id == NO_TOKEN:
            break  # what is wrong there is told when its turn comes
        logprob = None if num_top is None else sampled_logprob(sampled, row + offset, num_top)
        try:
            tokens.append(CommittedToken(token_id, logprob, state.accept_token(token_id)))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of a library in Rust is no Exception
            break  # as above
    num_computed = len(span.token_ids) - span.num_drafts - 1 + len(tokens)
    return first._replace(
        num_computed=num_computed, tokens=tuple(tokens), num_rejected=len(span.token_ids) - num_computed
    )


def num_accepted(span: Span, commit: Commit) -> int:
    """How many of a span's drafts are in its commit."""
    drafts = span.token_ids[-span.num_drafts :]
    pairs = zip(drafts, commit.tokens, strict=False)
    return sum(draft == token.token_id for draft, token in pairs)
