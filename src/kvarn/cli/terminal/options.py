"""Options that several commands share, alone or in groups, and how they become parameters and a loaded model.

A command takes a group, a dataclass, as one keyword parameter; flatten_options() makes an option of each field.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from kvarn.types import Completion, SamplingParams

if TYPE_CHECKING:
    from kvarn.llm import LLM

QUIET_LOAD_S = 1.0  # a load that takes less shows no bar

Model = Annotated[
    str, typer.Option("--model", "-m", help="Path, alias (smollm2, minilm), pypi:package or hf:org/repo.")
]
System = Annotated[str | None, typer.Option("--system", "-s", help="System message.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", help="Longest answer. [default: context]")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", "-t", help="0 is greedy. [default: the model's, else 0.7]")
]
TopP = Annotated[float | None, typer.Option("--top-p", help="Nucleus. [default: the model's, else 0.95]")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same answer. [default: random]")]
Threads = Annotated[int | None, typer.Option("--threads", help="[default: usable cores, see `kvarn doctor`]")]
BackendName = Annotated[
    str | None, typer.Option("--backend", help="auto, native, reference; torch, cuda or mps. [default: auto]")
]
Context = Annotated[int | None, typer.Option("--context", help="Tokens of prompt and answer. [default: the model's]")]

Lora = Annotated[
    Path | None,
    typer.Option("--lora", readable=False, help="Answer with this adapter: a PEFT folder or a GGUF adapter."),
]

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        readable=False,
        help="TOML file with any setting, see `kvarn config explain`; relative paths in it begin at its folder.",
    ),
]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="Key for the server. [default: KVARN_API_KEY]")]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How an answer is sampled."""

    max_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    seed: Seed = None

    def params(self) -> SamplingParams:
        """Sampling parameters; wrong values are refused before a model is loaded."""
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed
        )


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model runs on this machine."""

    threads: Threads = None
    context: Context = None
    backend: BackendName = None
    device: Annotated[str | None, typer.Option(help="Of torch: cuda:1, cpu. [default: the first GPU, else cpu]")] = None
    tensor_parallel: Annotated[int | None, typer.Option(metavar="N", help="GPUs that share every layer.")] = None
    pipeline_parallel: Annotated[int | None, typer.Option(metavar="N", help="GPUs that divide the layers.")] = None
    speculation: Annotated[
        str | None,
        typer.Option(
            "--speculate",
            metavar="off|auto|METHODS",
            help="Guess tokens and check several at once: same text, sooner. auto: prediction, ngram, grammar, mtp (a "
            "layer of the file) and draft (--draft-model), each only while it pays; or a list, also with suffix "
            "(remembers each tenant's answers). [default: off]",
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A small model of the same vocabulary that guesses: with --speculate auto."),
    ] = None

    def given(self) -> dict[str, Any]:
        """The fields of EngineConfig whose options were given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def flatten_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the option groups among a command's parameters, which are dataclasses, by one option for each field."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    if not groups:
        return command

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{option.name: values.pop(option.name) for option in fields(group)})
        command(**values)

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if group := groups.get(parameter.name):
            options = get_type_hints(group, include_extras=True)
            parameters += [
                parameter.replace(name=option.name, default=_default(option), annotation=options[option.name])
                for option in fields(group)
            ]
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return flat


def _default(option: Field[Any]) -> Any:
    """What a signature has for an option; one without a default is required."""
    return inspect.Parameter.empty if option.default is MISSING else option.default


@contextmanager
def open_llm(model: str, options: EngineOptions, at_once: int = 0, kv_bytes: int | None = None) -> Iterator[LLM]:
    """Load a model, with room for `at_once` requests in a step, with a progress bar on stderr where it takes long."""
    from kvarn.cli.terminal.progress import progress_bar
    from kvarn.config import EngineConfig
    from kvarn.llm import LLM

    config = EngineConfig(**options.given())
    rows = max(at_once, config.max_running), max(at_once, config.max_batch_tokens)
    config = replace(config, max_running=rows[0], max_batch_tokens=rows[1], kv_bytes=kv_bytes)
    started = time.perf_counter()
    with progress_bar() as draw:

        def on_progress(done: int, total: int | None, label: str) -> None:
            is_slow = time.perf_counter() - started > QUIET_LOAD_S
            if label != "loading" or (is_slow and sys.stderr.isatty()):
                draw(done, total, label)

        llm = LLM(model, config=config, progress=on_progress)
    with llm:
        yield llm


def load_lora(llm: LLM, path: Path | None) -> str | None:
    """Load an adapter, if one was given; its name for requests."""
    return None if path is None else llm.load_lora(path, "lora").name


def stats_line(completion: Completion) -> str:
    """Token counts and speed of an answer, as one line for people."""
    usage, timings = completion.usage, completion.timings
    parts = [f"{usage.prompt_tokens:,} + {usage.completion_tokens:,} tokens"]
    speed = timings.tokens_per_s(usage.completion_tokens)
    if speed:
        parts.append(f"{speed:.1f} tokens/s")
    parts.append(f"first token after {timings.first_token_s:.2f} s")
    return ", ".join(parts)
