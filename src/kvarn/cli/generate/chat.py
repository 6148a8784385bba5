"""`kvarn chat`: a conversation with a model here or behind a URL.

Ctrl-C stops the answer and keeps the session, Ctrl-D ends it.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from kvarn.cli.terminal.options import (
    ApiKey,
    Context,
    MaxTokens,
    Seed,
    System,
    Temperature,
    Threads,
    TopP,
    opened,
    sampling,
    stats_line,
)
from kvarn.cli.terminal.text import Writer, checked, printable, system_sentence
from kvarn.config import DEFAULT_MODEL, client_key
from kvarn.errors import ConfigError, InvalidParameter, PromptTooLong, RequestError
from kvarn.types import FinishReason, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from kvarn.cli.generate.remote import RemoteModel

PROMPT = "> "
CONTINUED = ". "
QUOTES = '"""'
HELP = '''/help          this text
/reset         forget the conversation, keep the system message
/system TEXT   set the system message and forget the conversation; without TEXT: none
/save FILE     write the conversation as JSON
A line that ends in \\ goes on; """ begins and ends a text of several lines.
Ctrl-C stops an answer, Ctrl-D ends the chat.'''


def chat(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Path, alias (smollm2, minilm), pypi:package or hf:org/repo; with --url, as the server calls it. "
            "[default: smollm2, or the first the server lists]",
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Talk through an OpenAI-compatible server, as http://127.0.0.1:8000.")
    ] = None,
    api_key: ApiKey = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    threads: Threads = None,
    context: Context = None,
) -> None:
    """Talk with a model. /help lists what you can do inside."""
    params = sampling(max_tokens, temperature, top_p, seed)
    if system is not None:
        checked(system, "--system")
    if url is not None:
        remote = _behind(url, model, api_key, {"--threads": threads, "--context": context})
        conversation = ChatSession(remote, params, system)
        conversation.greet(remote.name, remote.context)
        conversation.run()
        return
    if api_key is not None:
        raise ConfigError("--api-key is for a server; give its --url too")
    with opened(model or DEFAULT_MODEL, threads, context) as llm:
        conversation = ChatSession(llm, params, system)
        conversation.rehearse()
        conversation.greet(llm.spec.name, llm.context)
        conversation.run()


def _behind(url: str, model: str | None, key: str | None, local: dict[str, int | None]) -> RemoteModel:
    """The model behind a URL; options that only a model here can follow are refused."""
    from kvarn.cli.generate.remote import RemoteModel

    if given := [name for name, value in local.items() if value is not None]:
        raise ConfigError(f"{' and '.join(given)} cannot be set for a server from here; leave out that or --url")
    return RemoteModel(url, model, key or client_key())


class Reply(Protocol):
    """Events of one answer; the last has a completion."""

    def __iter__(self) -> Iterator[TokenEvent]: ...
    def __enter__(self) -> Reply: ...
    def __exit__(self, *_: object) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class Partner(Protocol):
    """Who answers: a model here, or one behind a URL."""

    def stream(self, messages: list[dict[str, str]], params: SamplingParams, /) -> Reply: ...


class ChatSession:
    """The messages so far, and what each line does to them."""

    def __init__(self, partner: Partner, params: SamplingParams, system: str | None) -> None:
        self._partner = partner
        self._params = params
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._interrupt = Interrupt()
        self.reset()

    def rehearse(self) -> None:
        """Ask something and take it back: a model that cannot chat says so now, not after the first message."""
        self._partner.stream([*self._messages, {"role": "user", "content": "?"}], self._params).close()

    def greet(self, name: str, context: int | None) -> None:
        with suppress(ImportError):
            import readline  # noqa: F401 - line editing and recall in input()
        size = "" if context is None else f", {context:,} tokens of context"
        _say(f"{printable(name)}{size}. /help helps, Ctrl-D ends.")

    def run(self) -> None:
        """Read, answer, repeat, until the input ends."""
        with self._interrupt.handled():
            while True:
                try:
                    with self._interrupt.raised():
                        text = read_message()
                except EOFError:
                    _say("")
                    return
                except KeyboardInterrupt:
                    _say("\nCtrl-D ends the chat.")
                    continue
                self._take(text)

    def reset(self) -> None:
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def _take(self, text: str) -> None:
        try:
            if text.startswith("/"):
                self._obey(*text[1:].split(maxsplit=1))
            elif text.strip():
                self._answer(checked(text, "the message"))
        except PromptTooLong as error:
            _say(f"{error}; /reset starts anew")
        except BrokenPipeError:  # nobody reads the answers any more
            raise
        except OSError as error:
            _say(system_sentence(error))
        except RequestError as error:
            _say(printable(str(error)))

    def _answer(self, text: str) -> None:
        question = {"role": "user", "content": text}
        writer = Writer()
        with self._partner.stream([*self._messages, question], self._params) as events:
            self._interrupt.cancels(events)
            for event in events:
                writer.write(event.text)
        writer.end_line()
        completion = event.completion
        assert completion is not None
        self._messages += [question, {"role": "assistant", "content": completion.text}]
        stopped = "stopped, " if completion.finish_reason is FinishReason.CANCELLED else ""
        _say(f"[{stopped}{stats_line(completion)}]")

    def _obey(self, command: str = "", argument: str = "") -> None:
        if command == "help":
            _say(HELP)
        elif command == "reset":
            self.reset()
            _say("The conversation is forgotten.")
        elif command == "system":
            self._system = checked(argument, "the system message") or None
            self.reset()
            _say("The system message is set; the conversation starts anew.")
        elif command == "save":
            self._save(argument)
        else:
            raise InvalidParameter(f"there is no command /{command}; /help lists them")

    def _save(self, name: str) -> None:
        if not name:
            raise InvalidParameter("/save needs the name of a file")
        path = Path(name).expanduser()
        path.write_text(json.dumps(self._messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        _say(f"Saved {len(self._messages)} messages to {path}.")


class Interrupt:
    """What Ctrl-C does: at the prompt it raises, otherwise it ends the answer within one step."""

    def __init__(self) -> None:
        self._is_reading = False
        self._is_pressed = False
        self._events: Reply | None = None

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Own the signal for a whole session, so that no moment of it is left to a traceback."""
        before = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Let Ctrl-C interrupt reading; what was pressed before is forgotten."""
        self._is_reading, self._is_pressed, self._events = True, False, None
        try:
            yield
        finally:
            self._is_reading = False

    def cancels(self, events: Reply) -> None:
        """Name the answer to end; at once when the key was pressed while it was prepared."""
        self._events = events
        if self._is_pressed:
            events.cancel()

    def _on_signal(self, *_: object) -> None:
        if self._is_reading:
            raise KeyboardInterrupt
        self._is_pressed = True
        if self._events is not None:
            self._events.cancel()


def read_message() -> str:
    """One message: a line, lines joined by a backslash at their end, or a block between triple quotes."""
    line = _line(PROMPT)
    if line.startswith(QUOTES):
        return _quoted(line[len(QUOTES) :])
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = _line(CONTINUED)
    return "\n".join([*lines, line])


def _quoted(line: str) -> str:
    lines = []
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        line = _line(CONTINUED)
    return "\n".join([*lines, line.rstrip()[: -len(QUOTES)]])


def _line(prompt: str) -> str:
    while True:
        try:
            return input(prompt if sys.stdin.isatty() else "")
        except UnicodeDecodeError:
            _say("That line is not valid UTF-8; try again.")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
