"""From a conversation or a prompt to submissions the engine can take, all numbers compared with the model's limits.

Runs in worker threads: it encodes text. Knows token counts and limits; knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kvarn.engine.submission import Submission
from kvarn.errors import InvalidParameter, UnsupportedModel
from kvarn.formats.strict_json import strings
from kvarn.server.api.schema import InvalidField, field_at_fault, item_at_fault
from kvarn.server.api.text_inputs import name_of_item
from kvarn.server.chat.pending_constraint import PendingConstraint, found
from kvarn.server.chat.prompt_limits import ROOM, check_bounded, tools_at_fault
from kvarn.structured.constraints import JsonSchema
from kvarn.submissions import with_fim_stops
from kvarn.tokenizer.chat.template import encode_messages
from kvarn.tokenizer.fim import Infill

if TYPE_CHECKING:
    from kvarn.llm import LLM
    from kvarn.server.access.keys import Principal
    from kvarn.server.chat.conversation import Conversation
    from kvarn.server.chat.output.output_plan import OutputPlan
    from kvarn.server.models.served_model import ServedModel
    from kvarn.server.request_context import RequestContext
    from kvarn.structured.constraints import Constraint
    from kvarn.types import SamplingParams

Prepare = Callable[[], Submission]
Lengths = tuple[int, int]  # tokens of a prompt, and of the longest answer to it
MAX_LOGPROB_ENTRIES = 1_000_000  # of one request, held until it ends: about 100 bytes each
MAX_PROMPT_LOGPROB_ENTRIES = 65_536
TRUNCATED_ROOM = 8  # contexts: what may be given where only its end is read


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request other than sampling."""

    priority: int | None = None  # clamped to the tier; None: the tier's own
    cache_salt: str = ""  # finds only cached prefixes of the same tenant and salt
    limit_field: str = "max_tokens"  # the body's name of max_tokens
    is_clamped: bool = False  # max_tokens is an upper bound, lowered where context or tier leave less; else refused
    is_short: bool = False  # what is to be encoded takes no longer than a change of threads


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Checked submissions, and what they may take together."""

    submissions: tuple[Submission, ...]  # some with a PendingConstraint
    num_tokens: int  # of the prompts, and of the answers with max_tokens
    num_answers: int
    open_ended: tuple[int, ...]  # the longest each of the others can get
    warning: str | None = None  # what is not as asked

    @property
    def is_pending(self) -> bool:
        """Whether a constraint must be compiled yet."""
        return any(isinstance(one.constraint, PendingConstraint) for one in self.submissions)

    @property
    def has_scores(self) -> bool:
        """Whether logprobs are returned, which take long to write."""
        wanted = (one.params for one in self.submissions)
        return any(params.logprobs is not None or params.prompt_logprobs is not None for params in wanted)


def make_plan(
    request: RequestContext, model: ServedModel, prepare: Sequence[Prepare], options: RequestOptions, queue_limit: int
) -> GenerationPlan:
    """Prepare each prompt, then check every number against the model."""
    principal, llm = request.principal, model.llm.llm
    admitted = []
    for index, make in enumerate(request.while_wanted(prepare)):
        with item_at_fault(name_of_item("prompt", index, len(prepare))):
            admitted.append(_admit(llm, make(), options))
    is_open_ended = [_is_open_ended(one) for one in admitted]
    submissions = _fit_tier_minute(llm, principal.tier.tokens_per_min, admitted, is_clamped=options.is_clamped)
    lengths = [_lengths(one) for one in submissions]
    _check_bounds(submissions, lengths, queue_limit)
    tenant = tenant_of(principal, options.cache_salt)
    changes = {
        "deadline_s": max(request.deadline.left_s, 1e-3),
        "priority": principal.tier.clamp(options.priority),
    }
    marks = request.prefix_marks if len(submissions) == 1 else ()
    ready = tuple(
        replace(one, params=one.params.replace(**changes), tenant=tenant, adapters=model.adapters, prefix_marks=marks)
        for one in submissions
    )
    ready = found(ready, llm.submissions.constraints)
    num_tokens, open_ended = 0, []
    for one, (num_prompt, room), is_open in zip(ready, lengths, is_open_ended, strict=True):
        num_tokens += num_prompt + (0 if is_open else one.params.n * room)
        open_ended += [room] * one.params.n if is_open else []
    warning = _lowered(admitted, lengths, options.limit_field)
    return GenerationPlan(ready, num_tokens, sum(one.params.n for one in ready), tuple(open_ended), warning)


def chat_submission(model: ServedModel, chat: Conversation, plan: OutputPlan) -> Submission:
    """Write the conversation with the model's template and encode it; its constraint is pending."""
    llm = model.llm.llm
    messages = plan.messages(chat.messages)  # with the tools that the template does not write
    with tools_at_fault(llm, chat.messages, chat.tools):
        _check_length(llm, list(strings([messages, plan.template_tools, chat.template_kwargs])), chat.params)
        ids = encode_messages(llm.tokenizer, messages, plan.template_tools, chat.template_kwargs)
        if chat.params.truncate is None:
            llm.admission.check_length(len(ids), llm.context - 1)
    wanted, pending = _constraint_of_chat(llm, ids, chat, plan)
    params = chat.params.replace(constraint=wanted)
    predicted = llm.submissions.prediction(params)
    return Submission(ids, params, True, visible_ids=plan.visible_ids, constraint=pending, prediction_ids=predicted)


def prompt_ids_of(model: ServedModel, chat: Conversation, plan: OutputPlan) -> list[int]:
    """The conversation as the model reads it, however long."""
    messages = plan.messages(chat.messages)
    return encode_messages(model.llm.llm.tokenizer, messages, plan.template_tools, chat.template_kwargs)


def _constraint_of_chat(
    llm: LLM, ids: Sequence[int], chat: Conversation, plan: OutputPlan
) -> tuple[Constraint | None, PendingConstraint | None]:
    text = chat.params.constraint
    if plan.tools and isinstance(text, JsonSchema):
        return text, PendingConstraint(partial(plan.calls_or_text, llm.tokenizer, ids, text), chat.constrained_by)
    field = "tools" if plan.tools else chat.constrained_by
    with field_at_fault(field):
        wanted = plan.constraint(llm.tokenizer, ids, text)
    return wanted, _pending(llm, ids, plan, wanted, field)


def _pending(
    llm: LLM, ids: Sequence[int], plan: OutputPlan, wanted: Constraint | None, field: str | None
) -> PendingConstraint | None:
    if wanted is not None:
        return PendingConstraint(lambda compile: compile(wanted), field)
    if not plan.tools or llm.spec.is_diffusion:
        return None  # a diffusion model writes in no order that a grammar could follow
    return PendingConstraint(partial(plan.lazy_constraint, llm.tokenizer, ids), field)


def text_submission(
    model: ServedModel,
    prompt: str | Sequence[int],
    params: SamplingParams,
    constrained_by: str | None = None,
    *,
    parse_special: bool = False,
) -> Submission:
    """Encode a text, or take token ids as they are. parse_special: control tokens in the text are control tokens."""
    llm = model.llm.llm
    if isinstance(prompt, str):
        _check_length(llm, [prompt], params)
        prompt = llm.tokenizer.encode(prompt, parse_special=parse_special)
    if llm.tokenizer.fim is not None and llm.tokenizer.fim.middle in prompt:
        params = with_fim_stops(llm.tokenizer, params)
    plain = params if params.constraint is None else params.replace(constraint=None)
    return _constrained(llm.submissions.of_ids(prompt, plain), params.constraint, constrained_by)


def infill_submission(
    model: ServedModel, infill: Infill, params: SamplingParams, constrained_by: str | None = None, *, field: str
) -> Submission:
    """Ask for the text between two others; field: the name of what stands after."""
    llm = model.llm.llm
    _check_length(llm, [infill.prefix, infill.suffix], params)
    others = [text for file in infill.files for text in (file.name, file.text)]
    check_bounded(llm, others, "input_extra", room=TRUNCATED_ROOM)
    try:
        submission = llm.submissions.of_infill(infill, params.replace(constraint=None), llm.context)
    except UnsupportedModel as error:
        raise InvalidField(str(error), field, "unsupported_by_model") from None
    return _constrained(submission, params.constraint, constrained_by)


def _constrained(submission: Submission, wanted: Constraint | None, field: str | None) -> Submission:
    if wanted is None:
        return submission
    params = submission.params.replace(constraint=wanted)
    return replace(submission, params=params, constraint=PendingConstraint(lambda compile: compile(wanted), field))


def _check_length(llm: LLM, texts: Collection[str], params: SamplingParams) -> None:
    """Refuse what cannot fit before all of it is cut into tokens, which takes time."""
    check_bounded(llm, texts, None, room=ROOM if params.truncate is None else TRUNCATED_ROOM)


def tenant_of(principal: Principal, cache_salt: str) -> str:
    """Whose cached prefixes a request may find; never with two NULs in a row, behind which adapters are told."""
    salt = f".{cache_salt}".replace("\0", "\0.")
    return f"{principal.tenant}\0{salt}" if cache_salt else principal.tenant


def _admit(llm: LLM, submission: Submission, options: RequestOptions) -> Submission:
    """Bound the answer; one that cannot get as long as asked for is refused, unless the dialect wants it shorter."""
    params = submission.params
    submission = llm.admission.admit(submission)
    num_prompt, room = _lengths(submission)
    is_short = params.max_tokens is not None and not params.prefill_only and room < params.max_tokens
    if is_short and not options.is_clamped:
        raise InvalidField(
            f"{options.limit_field} is {params.max_tokens:,} and the prompt has {num_prompt:,} tokens; "
            f"the context allows {llm.context:,} together; lower it to {room:,} or shorten the prompt",
            options.limit_field,
            "context_length_exceeded",
        )
    return submission


def _lowered(admitted: Sequence[Submission], lengths: Sequence[Lengths], limit_field: str) -> str | None:
    """The warning about an answer that may not get as long as asked for."""
    for one, (num_prompt, room) in zip(admitted, lengths, strict=True):
        wanted = one.params.max_tokens
        if wanted is not None and not one.params.prefill_only and room < wanted:
            return f"{limit_field} lowered from {wanted} to {room}: the prompt has {num_prompt} tokens"
    return None


def _lengths(submission: Submission) -> Lengths:
    admitted = submission.admitted
    assert admitted is not None
    return len(admitted.prompt_ids), 0 if submission.params.prefill_only else admitted.max_tokens


def _fit_tier_minute(
    llm: LLM, limit: int | None, submissions: list[Submission], *, is_clamped: bool
) -> list[Submission]:
    """Answers without max_tokens, or with one to be lowered, share what the tier's minute leaves, at least one each."""
    lengths = [(one, is_clamped or _has_no_limit(one), *_lengths(one)) for one in submissions]
    num_flexible = sum(one.params.n for one, is_flexible, *_ in lengths if is_flexible)
    if limit is None or not num_flexible:
        return submissions
    fixed = sum(
        num_prompt + (0 if is_flexible else one.params.n * room) for one, is_flexible, num_prompt, room in lengths
    )
    share = max(1, (limit - fixed) // num_flexible)
    return [
        _shortened(llm, one, share) if is_flexible and room > share else one for one, is_flexible, _, room in lengths
    ]


def _shortened(llm: LLM, submission: Submission, max_tokens: int) -> Submission:
    params = submission.params.replace(max_tokens=max_tokens)
    return llm.admission.admit(replace(submission, params=params, admitted=None))


def _is_open_ended(submission: Submission) -> bool:
    """Whether nobody knows how long the answer gets: it has no limit, or one beyond what the context leaves."""
    limit, (_, room) = submission.params.max_tokens, _lengths(submission)
    return _has_no_limit(submission) or (limit is not None and not submission.params.prefill_only and room < limit)


def _has_no_limit(submission: Submission) -> bool:
    return submission.params.max_tokens is None and not submission.params.prefill_only


def check_answers(num_answers: int, queue_limit: int) -> None:
    """Refuse what could never be queued."""
    if num_answers > queue_limit:
        raise InvalidParameter(
            f"{num_answers:,} answers were asked for at once, the queue holds {queue_limit:,}; send fewer prompts or "
            "lower n",
            field="n",
        )


def _check_bounds(submissions: Sequence[Submission], lengths: Sequence[Lengths], queue_limit: int) -> None:
    """Refuse what could never be queued, and logprobs that would fill the memory."""
    check_answers(sum(one.params.n for one in submissions), queue_limit)
    pairs = list(zip(submissions, lengths, strict=True))
    entries = sum(_entries(one.params.logprobs) * one.params.n * room for one, (_, room) in pairs)
    if entries > MAX_LOGPROB_ENTRIES:
        raise InvalidField(
            f"{entries:,} logprobs could be returned, at most {MAX_LOGPROB_ENTRIES:,} are; "
            "lower top_logprobs, max_tokens or n",
            "logprobs",
            mentions=("top_logprobs, max_tokens or n",),
        )
    read = sum(_entries(one.params.prompt_logprobs) * num_prompt for one, (num_prompt, _) in pairs)
    if read > MAX_PROMPT_LOGPROB_ENTRIES:
        raise InvalidField(
            f"{read:,} logprobs of prompt tokens would be returned, at most {MAX_PROMPT_LOGPROB_ENTRIES:,} are; "
            "shorten the prompt or lower prompt_logprobs",
            "prompt_logprobs",
        )


def _entries(top: int | None) -> int:
    """Logprobs of one token: the chosen one and the most probable ones."""
    return 0 if top is None else 1 + top
