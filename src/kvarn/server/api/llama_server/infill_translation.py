"""The body of /infill as texts and sampling parameters. Pure functions, but for what needs the model's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvarn.errors import ConstraintError
from kvarn.server.api.schema import InvalidField, field_at_fault
from kvarn.server.chat.generation_plan import infill_submission
from kvarn.structured.constraints import Constraint, Grammar, JsonSchema
from kvarn.tokenizer.fim import Infill, SourceFile
from kvarn.types import MAX_LOGIT_BIAS, SamplingParams

if TYPE_CHECKING:
    from kvarn.engine.submission import Submission
    from kvarn.server.api.llama_server.infill_schema import InfillBody
    from kvarn.server.models.served_model import ServedModel
    from kvarn.tokenizer.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 16 << 10  # of GBNF: its translation goes over all rules once for each of them
MAX_RULES = 256
RANDOM_SEEDS = (-1, 2**32 - 1)  # as a signed and as an unsigned number
_SAME = (
    *("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "dry_multiplier"),
    *("dry_base", "dry_allowed_length", "dry_sequence_breakers", "xtc_probability", "xtc_threshold", "ignore_eos"),
    *("seed", "stop", "stop_token_ids"),
)
_OFF: Mapping[str, Mapping[str, float]] = {  # what makes a sampler do nothing
    "dry": {"dry_multiplier": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
    "xtc": {"xtc_probability": 0.0},
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}


def infill_of(body: InfillBody) -> Infill:
    """The texts."""
    files = [SourceFile(file.text, file.filename or "tmp") for file in body.input_extra or ()]
    return Infill(body.input_prefix + (body.prompt or ""), body.input_suffix, files)


def infill_params(body: InfillBody, max_n: int) -> SamplingParams:
    """How tokens are chosen, as far as no model is needed."""
    if body.n_cmpl is not None and body.n_cmpl > max_n:
        raise InvalidField(f"n_cmpl is {body.n_cmpl}; this server gives at most {max_n} answers", "n_cmpl")
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    if body.seed in RANDOM_SEEDS:
        del given["seed"]
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)
    if body.repeat_penalty is not None:
        given["repetition_penalty"] = body.repeat_penalty
    if body.max_answer is not None:
        given |= {"max_tokens": max(1, body.max_answer), "prefill_only": body.max_answer == 0}
    given |= {"n": body.n_cmpl or 1, "logprobs": body.n_probs or None}
    for sampler in _turned_off(body):
        given |= _OFF[sampler]
    given["penalty_window"] = _penalty_window(body, given)
    return SamplingParams(**given)


def prepared_infill(model: ServedModel, body: InfillBody, params: SamplingParams) -> Submission:
    """The prompt, and with the model's words what is left of the parameters. Runs in a worker thread."""
    field = "grammar" if body.grammar else "json_schema" if body.json_schema is not None else None
    with field_at_fault(field):
        constraint = _constraint(body)
    params = params.replace(logit_bias=_biases(model.llm.llm.tokenizer, body), constraint=constraint)
    return infill_submission(model, infill_of(body), params, field, field="input_suffix")


def _turned_off(body: InfillBody) -> set[str]:
    off = set() if body.samplers is None else _OFF.keys() - set(body.samplers)
    if body.repeat_last_n == 0:
        off |= {"penalties"}
    if body.dry_penalty_last_n == 0:
        off |= {"dry"}
    return off


def _penalty_window(body: InfillBody, given: Mapping[str, Any]) -> int | None:
    """How far penalties look back; here DRY looks as far as the others."""
    has_dry = given.get("dry_multiplier", 0.0) > 0
    neutral = _OFF["penalties"]
    has_others = any(given.get(name, off) != off for name, off in neutral.items())
    windows = [
        None if wanted in (None, -1) else wanted
        for wanted, is_on in ((body.repeat_last_n, has_others), (body.dry_penalty_last_n, has_dry))
        if is_on
    ]
    if len(set(windows)) > 1:
        raise InvalidField(
            "dry_penalty_last_n and repeat_last_n differ, and all penalties look equally far back here; give both the "
            "same number",
            "dry_penalty_last_n",
            mentions=("dry_penalty_last_n and repeat_last_n",),
        )
    return windows[0] if windows else None


def _biases(tokenizer: Tokenizer, body: InfillBody) -> dict[int, float]:
    """By id; of a text, each of its tokens, and the biases of one token add up."""
    biases: dict[int, float] = {}
    for token, bias in body.logit_bias or ():
        ids = [token] if isinstance(token, int) else tokenizer.encode(token, add_special=False)
        for token_id in ids:
            biases[token_id] = max(-100.0, min(100.0, biases.get(token_id, 0.0) + bias))
    if len(biases) > MAX_LOGIT_BIAS:
        raise InvalidField(
            f"logit_bias has {len(biases)} tokens, at most {MAX_LOGIT_BIAS} are allowed; give fewer or shorter texts",
            "logit_bias",
        )
    return biases


def _constraint(body: InfillBody) -> Constraint | None:
    if body.grammar and body.json_schema is not None:
        raise InvalidField("grammar and json_schema are both given; give one of them", "json_schema")
    if body.json_schema is not None:
        return JsonSchema(body.json_schema)
    if not body.grammar:
        return None
    return Grammar(body.grammar if body.grammar.lstrip().startswith("%llguidance") else _lark(body.grammar))


def _lark(gbnf: str) -> str:
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    num_bytes, num_rules = len(gbnf.encode("utf-8", "replace")), gbnf.count("::=")
    if num_bytes > MAX_GRAMMAR_BYTES or num_rules > MAX_RULES:
        raise ConstraintError(
            f"it has {num_bytes:,} bytes and {num_rules:,} rules; at most {MAX_GRAMMAR_BYTES:,} and {MAX_RULES} are "
            "allowed in GBNF: make it smaller, or send json_schema"
        )
    try:
        return str(gbnf_to_lark(gbnf))
    except GbnfToLarkError as error:
        line = error.pos.text.count("\n", 0, error.pos.pos) + 1
        raise ConstraintError(f"line {line} is no GBNF, llama.cpp's form of grammars") from None
    except Exception as error:  # a rule that is missing or there twice, groups nested too deeply
        raise ConstraintError(f"it is no GBNF with a rule root ({type(error).__name__})") from None
