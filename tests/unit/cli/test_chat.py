"""`kvarn chat` under a real terminal: history, several lines, commands, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvarn.citations.types import Citation, CitedPassage, Grounded, SentenceSupport
from kvarn.cli.generate.chat import Interrupt
from kvarn.cli.generate.chat_models import LoadedChat
from kvarn.cli.generate.cited_sources import source_lines
from kvarn.engine.client import EngineClient, EventStream
from kvarn.errors import InvalidParameter
from kvarn.llm import LLM
from kvarn.structured.constraints import Regex
from kvarn.types import FinishReason, SamplingParams
from tests.chat_model import write_chat_model
from tests.forked import COMMAND
from tests.submitting import submit_to
from tests.unit.engine.fake import make_engine

ANSWERED = r"\[[^\]]*first token after [^\]]*\]"


class Terminal:
    """A process on the other side of a pseudo-terminal."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        # The child makes the pseudo-terminal its controlling one, so that Ctrl-C becomes a signal.
        own = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", own, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, pattern: str, timeout_s: float = 30.0) -> str:
        """Wait for pattern and return everything up to it."""
        end = time.monotonic() + timeout_s
        while (match := re.search(pattern, self._seen)) is None:
            self._read(end, pattern)
        before, self._seen = self._seen[: match.end()], self._seen[match.end() :]
        return before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=30)
        os.close(self._master)

    def _read(self, end: float, pattern: str) -> None:
        ready, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"{pattern!r} did not come; there was {self._seen!r}"
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other side is closed
            data = b""
        assert data, f"the chat ended before {pattern!r}; there was {self._seen!r}"
        self._seen += data.decode(errors="replace")


@pytest.fixture
def terminal(model: str, environment: dict[str, str]) -> Iterator[Terminal]:
    options = ["-m", model, "-t", "0", "-n", "6", "--system", "be brief"]
    terminal = Terminal([*COMMAND, "chat", *options], environment | {"TERM": "dumb"})
    terminal.expect("> ")
    yield terminal
    terminal.close()


def saved(terminal: Terminal, path: Path) -> list[dict[str, str]]:
    terminal.type(f"/save {path}\n")
    terminal.expect("Saved")
    messages: list[dict[str, str]] = json.loads(path.read_text())
    return messages


def ask(terminal: Terminal, text: str) -> None:
    terminal.type(text)
    terminal.expect(ANSWERED)
    terminal.expect("> ")


def test_a_conversation_is_kept_and_can_be_saved(terminal: Terminal, tmp_path: Path) -> None:
    ask(terminal, "hello\n")
    ask(terminal, "more\n")
    messages = saved(terminal, tmp_path / "chat.json")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in messages[1::2]] == ["hello", "more"]


def test_lines_can_be_joined(terminal: Terminal, tmp_path: Path) -> None:
    ask(terminal, "one\\\ntwo\n")
    ask(terminal, '"""three\n\nfour"""\n')
    contents = [message["content"] for message in saved(terminal, tmp_path / "chat.json")]
    assert contents[1] == "one\ntwo"
    assert contents[3] == "three\n\nfour"


def test_reset_forgets_and_system_replaces(terminal: Terminal, tmp_path: Path) -> None:
    ask(terminal, "hello\n")
    terminal.type("/reset\n")
    terminal.expect("forgotten")
    assert saved(terminal, tmp_path / "a.json") == [{"role": "system", "content": "be brief"}]
    terminal.type("/system speak Swedish\n")
    terminal.expect("anew")
    assert saved(terminal, tmp_path / "b.json") == [{"role": "system", "content": "speak Swedish"}]


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("/help", "/reset"),
        ("/nonsense", "there is no command /nonsense"),
        ("/save", "needs the name"),
        ("/", "no command"),
    ],
)
def test_commands_answer(terminal: Terminal, line: str, answer: str) -> None:
    terminal.type(f"{line}\n")
    terminal.expect(re.escape(answer))
    terminal.expect("> ")


def test_a_failure_keeps_the_session(terminal: Terminal) -> None:
    terminal.type("/save /no/such/folder/x\n")
    terminal.expect("No such file")
    terminal.expect("> ")
    ask(terminal, "hello\n")


def test_control_d_ends_the_chat(terminal: Terminal) -> None:
    terminal.type("\x04")
    assert terminal.process.wait(timeout=30) == 0


def test_control_c_at_the_prompt_keeps_the_session(terminal: Terminal) -> None:
    terminal.type("half a tho")
    time.sleep(0.1)
    terminal.type("\x03")
    terminal.expect("Ctrl-D ends")
    terminal.expect("> ")
    ask(terminal, "hello\n")


def test_control_c_stops_the_answer_and_keeps_the_session(endless: str, environment: dict[str, str]) -> None:
    terminal = Terminal([*COMMAND, "chat", "-m", endless, "-t", "1.5"], environment | {"TERM": "dumb"})
    try:
        terminal.expect("> ")
        for _ in range(2):
            terminal.type("hello\n")
            terminal.expect("hello\r?\n.")  # the answer has begun
            terminal.type("\x03")
            assert "[stopped, " in terminal.expect(ANSWERED)
            terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=30) == 0
    finally:
        terminal.close()


def test_control_c_while_an_answer_is_prepared_ends_it_at_once() -> None:
    client, interrupt = EngineClient(make_engine()), Interrupt()
    with interrupt.installed():
        signal.raise_signal(signal.SIGINT)
        events = EventStream(submit_to(client, [1, 2, 3], SamplingParams(max_tokens=190, ignore_eos=True)))
        interrupt.cancel_on_signal(events)
        assert events.completion().finish_reason is FinishReason.CANCELLED


def test_control_c_before_the_prompt_does_not_end_the_next_answer() -> None:
    client, interrupt = EngineClient(make_engine()), Interrupt()
    with interrupt.installed():
        signal.raise_signal(signal.SIGINT)
        with interrupt.raising():
            pass
        events = EventStream(submit_to(client, [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True)))
        interrupt.cancel_on_signal(events)
        assert events.completion().finish_reason is FinishReason.LENGTH


def test_control_c_at_the_prompt_raises() -> None:
    interrupt = Interrupt()
    with interrupt.installed(), pytest.raises(KeyboardInterrupt), interrupt.raising():
        signal.raise_signal(signal.SIGINT)


def test_a_model_that_cannot_chat_says_so_before_the_first_message(environment: dict[str, str], tmp_path: Path) -> None:
    path = write_chat_model(tmp_path / "plain.gguf", **{"tokenizer.chat_template": None})
    done = subprocess.run(
        [*COMMAND, "chat", "-m", str(path)], input=b"", capture_output=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(b"kvarn: the model has no chat template; ")


def test_a_chat_ends_when_nobody_reads_its_answers(model: str, environment: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, "chat", "-m", model, "-n", "8"],
        input=b"one\ntwo\n",
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
        env=environment,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 1
    assert b"Broken pipe" not in done.stderr
    assert b"Traceback" not in done.stderr


class _NothingFound:
    """Grounds every conversation in no source."""

    def ground(self, messages: Sequence[Mapping[str, Any]], count: Callable[[str], int], context: int) -> Grounded:
        return Grounded(messages, (), constraint=Regex("Not here"))


def test_a_chat_with_a_collection_that_knows_nothing_refuses(tmp_path: Path) -> None:
    with LLM(write_chat_model(tmp_path / "chat.gguf")) as llm:
        chat = LoadedChat(llm, None, _NothingFound())
        with chat.stream([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=16)) as events:
            told = list(events)
    assert "".join(event.text for event in told) == "Not here"
    assert told[-1].completion is not None
    assert not list(source_lines(told[-1].completion))


class _TwoSources(_NothingFound):
    """Two sources, of which the second supports what the answer has to say."""

    def ground(self, messages: Sequence[Mapping[str, Any]], count: Callable[[str], int], context: int) -> Grounded:
        citations = (
            Citation(1, "1", "1.pdf", "1.pdf", (0, 9), 1.0, page=3, text="It is.\fSo it is."),
            Citation(2, "2", "2.md", "2.md", (0, 9), 1.0, lines=(2, 3)),
        )
        return Grounded(messages, citations, constraint=Regex(r"It is\. It may be\."), attributor=self)

    def attribute(self, answer: str) -> tuple[SentenceSupport, ...]:
        assert answer == "It is. It may be."
        return SentenceSupport((0, 6), 0.9, (CitedPassage(2, (0, 9), 0.9),)), SentenceSupport((7, 17), 0.1)


def test_cited_sources_and_unsupported_sentences_are_marked(tmp_path: Path) -> None:
    """By the path of LLM.chat: the stream's last event has what the completion of a chat has."""
    messages, params = [{"role": "user", "content": "hi"}], SamplingParams(max_tokens=32)
    with LLM(write_chat_model(tmp_path / "chat.gguf")) as llm:
        with LoadedChat(llm, None, _TwoSources()).stream(messages, params) as events:
            completion = list(events)[-1].completion
        answered = llm.chat(messages, params, retrieve=_TwoSources())
        with pytest.raises(InvalidParameter, match="with retrieve, give messages"):
            llm.stream("hi", params, retrieve=_TwoSources())
    assert completion is not None
    assert (completion.citations, completion.sentences) == (answered.citations, answered.sentences)
    assert list(source_lines(completion)) == [
        "[1] 1.pdf, pages 3-4, not cited",
        "[2] 2.md:2-3, cited",
        "not in the sources: It may be.",
    ]
