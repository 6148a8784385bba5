"""Options several commands share, and how they become a loaded model."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
Context = Annotated[int | None, typer.Option("--context", help="Tokens of prompt and answer. [default: the model's]")]

Config = Annotated[
    Path | None, typer.Option("--config", help="TOML file with any setting; `kvarn config explain` lists them.")
]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="Key for the server. [default: KVARN_API_KEY]")]


def sampling(
    max_tokens: int | None, temperature: float | None, top_p: float | None, seed: int | None
) -> SamplingParams:
    """Sampling parameters from options; wrong values are refused before a model is loaded."""
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)


@contextmanager
def opened(model: str, threads: int | None, context: int | None) -> Iterator[LLM]:
    """Load a model, with a progress bar on stderr where it takes long."""
    from kvarn.cli.terminal.progress import download_bar
    from kvarn.config import EngineConfig
    from kvarn.llm import LLM

    config = EngineConfig(threads=threads, context=context)
    started = time.perf_counter()
    with download_bar() as draw:

        def on_progress(done: int, total: int | None, label: str) -> None:
            is_slow = time.perf_counter() - started > QUIET_LOAD_S
            if label != "loading" or (is_slow and sys.stderr.isatty()):
                draw(done, total, label)

        llm = LLM(model, config=config, progress=on_progress)
    with llm:
        yield llm


def stats_line(completion: Completion) -> str:
    """Speed for people."""
    usage, timings = completion.usage, completion.timings
    parts = [f"{usage.prompt_tokens:,} + {usage.completion_tokens:,} tokens"]
    speed = timings.tokens_per_s(usage.completion_tokens)
    if speed:
        parts.append(f"{speed:.1f} tokens/s")
    parts.append(f"first token after {timings.first_token_s:.2f} s")
    return ", ".join(parts)
