"""`kvarn chat`: a conversation with a model loaded here or behind a URL.

Ctrl-C stops an answer and keeps the session, Ctrl-D ends the session.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn.cli.generate.chat_models import ChatModel, LoadedChat, Reply
from kvarn.cli.generate.cited_sources import source_lines
from kvarn.cli.terminal.options import (
    ApiKey,
    EngineOptions,
    Lora,
    SamplingOptions,
    System,
    load_lora,
    open_llm,
    stats_line,
)
from kvarn.cli.terminal.storage_options import StorageOptions
from kvarn.cli.terminal.text import Writer, os_error_text, printable, require_utf8
from kvarn.config import DEFAULT_MODEL, client_key
from kvarn.errors import ConfigError, InvalidParameter, PromptTooLong, RequestError
from kvarn.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from kvarn.cli.generate.remote import RemoteModel

PROMPT = "> "
CONTINUATION = ". "
QUOTES = '"""'
HELP = '''/help          this text
/reset         forget the conversation, keep the system message
/system TEXT   set the system message and forget the conversation; without TEXT: none
/save FILE     write the conversation as JSON
A line that ends in \\ goes on; """ begins and ends a text of several lines.
Ctrl-C stops an answer, Ctrl-D ends the chat.'''
AnyModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Path, alias (smollm2, minilm), pypi:package or hf:org/repo; with --url, as the server calls it. "
        "[default: smollm2, or the first the server lists]",
    ),
]
Documents = Annotated[
    str | None,
    typer.Option("--collection", "-c", metavar="NAME", help="Answer from these documents."),
]


def chat(
    *,
    model: AnyModel = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Talk through an OpenAI-compatible server, as http://127.0.0.1:8000.")
    ] = None,
    api_key: ApiKey = None,
    system: System = None,
    lora: Lora = None,
    collection: Documents = None,
    where: StorageOptions,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> None:
    """Talk with a model. /help lists what you can do inside."""
    params = sampling.params()
    if system is not None:
        require_utf8(system, "--system")
    if url is not None:
        if where.milvus_uri is not None:
            raise ConfigError("--milvus-uri is for a model loaded here; a server has a storage of its own")
        if lora is not None:
            raise ConfigError("--lora is for a model loaded here; a server's adapter is named with --model")
        remote = _connect(url, model, api_key, engine)
        remote.collection = collection
        session = ChatSession(remote, params, system)
        session.print_banner(remote.name, remote.context)
        session.run()
        return
    if api_key is not None:
        raise ConfigError("--api-key is for a server; give its --url too")
    with ExitStack() as opened:
        documents = None if collection is None else opened.enter_context(where.storage().open_to_search(collection))
        llm = opened.enter_context(open_llm(model or DEFAULT_MODEL, engine))
        session = ChatSession(LoadedChat(llm, load_lora(llm, lora), documents), params, system)
        session.require_chat_support()
        session.print_banner(llm.spec.name, llm.context)
        session.run()


def _connect(url: str, model: str | None, key: str | None, engine: EngineOptions) -> RemoteModel:
    """The model behind a URL; options that only a model loaded here can follow are refused."""
    from kvarn.cli.generate.remote import RemoteModel

    if given := [f"--{name.replace('_', '-')}" for name in engine.given()]:
        raise ConfigError(f"{' and '.join(given)} cannot be set for a server from here; leave out that or --url")
    return RemoteModel(url, model, key or client_key())


class ChatSession:
    """The messages so far, and what each line of input does to them."""

    def __init__(self, model: ChatModel, params: SamplingParams, system: str | None) -> None:
        self._model = model
        self._params = params
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._interrupt = Interrupt()
        self.reset()

    def require_chat_support(self) -> None:
        """Submit a message and cancel it: a model without a chat template is refused now, not after the first line."""
        self._model.stream([*self._messages, {"role": "user", "content": "?"}], self._params).close()

    def print_banner(self, name: str, context: int | None) -> None:
        with suppress(ImportError):
            import readline  # noqa: F401 - line editing and recall in input()
        size = "" if context is None else f", {context:,} tokens of context"
        _notify(f"{printable(name)}{size}. /help helps, Ctrl-D ends.")

    def run(self) -> None:
        """Read, answer, repeat, until the input ends."""
        with self._interrupt.installed():
            while True:
                try:
                    with self._interrupt.raising():
                        text = read_message()
                except EOFError:
                    _notify("")
                    return
                except KeyboardInterrupt:
                    _notify("\nCtrl-D ends the chat.")
                    continue
                self._handle(text)

    def reset(self) -> None:
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def _handle(self, text: str) -> None:
        try:
            if text.startswith("/"):
                self._run_command(*text[1:].split(maxsplit=1))
            elif text.strip():
                self._answer(require_utf8(text, "the message"))
        except PromptTooLong as error:
            _notify(f"{error}; /reset starts anew")
        except BrokenPipeError:  # stdout is closed
            raise
        except OSError as error:
            _notify(os_error_text(error))
        except RequestError as error:
            _notify(printable(str(error)))

    def _answer(self, text: str) -> None:
        message = {"role": "user", "content": text}
        writer = Writer()
        with self._model.stream([*self._messages, message], self._params) as events:
            self._interrupt.cancel_on_signal(events)
            for event in events:
                writer.write(event.text)
        writer.end_line()
        completion = event.completion
        assert completion is not None
        self._messages += [message, {"role": "assistant", "content": completion.text}]
        for line in source_lines(completion):
            _notify(printable(line))
        stopped = "stopped, " if completion.finish_reason is FinishReason.CANCELLED else ""
        _notify(f"[{stopped}{stats_line(completion)}]")

    def _run_command(self, command: str = "", argument: str = "") -> None:
        if command == "help":
            _notify(HELP)
        elif command == "reset":
            self.reset()
            _notify("The conversation is forgotten.")
        elif command == "system":
            self._system = require_utf8(argument, "the system message") or None
            self.reset()
            _notify("The system message is set; the conversation starts anew.")
        elif command == "save":
            self._save(argument)
        else:
            raise InvalidParameter(f"there is no command /{command}; /help lists them", field=None)

    def _save(self, name: str) -> None:
        if not name:
            raise InvalidParameter("/save needs the name of a file", field=None)
        path = Path(name).expanduser()
        path.write_text(json.dumps(self._messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        _notify(f"Saved {len(self._messages)} messages to {path}.")


class Interrupt:
    """What Ctrl-C does: at the prompt it raises KeyboardInterrupt, otherwise it ends the answer within one step."""

    def __init__(self) -> None:
        self._is_reading = False
        self._is_pressed = False
        self._events: Reply | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Own SIGINT for a whole session, so that it never ends in a traceback."""
        before = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Let Ctrl-C interrupt the reading of a line; what was pressed before is forgotten."""
        self._is_reading, self._is_pressed, self._events = True, False, None
        try:
            yield
        finally:
            self._is_reading = False

    def cancel_on_signal(self, events: Reply) -> None:
        """Set the answer that Ctrl-C cancels; cancelled at once when it was pressed while the request was prepared."""
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
        line = _line(CONTINUATION)
    return "\n".join([*lines, line])


def _quoted(line: str) -> str:
    lines = []
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        line = _line(CONTINUATION)
    return "\n".join([*lines, line.rstrip()[: -len(QUOTES)]])


def _line(prompt: str) -> str:
    while True:
        try:
            return input(prompt if sys.stdin.isatty() else "")
        except UnicodeDecodeError:
            _notify("That line is not valid UTF-8; try again.")


def _notify(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
