"""`kvarn ARGS` in a process of its own without the second that its imports take.

A command is forked from a process that has imported what commands import, and then is the command to its end: streams,
environment, exit code and signals are its own. The first use of every command starts an interpreter of its own instead,
so that an import that a command forgets is still missed.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import IO

from kvarn.cli.main import GROUPS
from kvarn.cli.main import main as run

Done = subprocess.CompletedProcess[bytes]

COMMAND = [sys.executable, "-m", "kvarn.cli.main"]
IMPORTED = ("kvarn.llm", "kvarn.quantization.quantize", "kvarn.server.process.serve")
MESSAGE_BYTES = 1 << 18


def run_kvarn(*arguments: str | bytes, env: Mapping[str, str], stdin: bytes = b"", timeout_s: float = 120.0) -> Done:
    """What subprocess.run gives, with both outputs as bytes."""
    words = [os.fsdecode(argument) for argument in arguments]
    parent, command = _parent(), " ".join(words[:2] if words[0] in GROUPS else words[:1])
    if parent is not None and command in parent.seen:
        return parent.fork(words, env, stdin, timeout_s)
    if parent is not None:
        parent.seen.add(command)
    return subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, timeout=timeout_s, env=dict(env), check=False
    )


def told_by_kvarn(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The same with both outputs as text."""
    done = run_kvarn(*arguments, env=os.environ if env is None else env)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


class Parent:
    """The process that commands are forked from, one at a time."""

    def __init__(self) -> None:
        self.seen: set[str] = set()  # commands that were started in an interpreter of their own
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._channel, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES)
        with theirs:
            command = [sys.executable, "-m", "tests.forked", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        atexit.register(self.close)

    def fork(self, words: list[str], env: Mapping[str, str], stdin: bytes, timeout_s: float) -> Done:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as warned:
            given.write(stdin)
            given.seek(0)
            message = json.dumps([words, dict(env), os.getcwd()]).encode()
            socket.send_fds(self._channel, [message], [one.fileno() for one in (given, told, warned)])
            child = int(self._channel.recv(64))
            self._channel.settimeout(timeout_s)
            try:
                code = int(self._channel.recv(64))
            except TimeoutError:
                os.kill(child, signal.SIGKILL)
                self._channel.settimeout(None)
                self._channel.recv(64)
                raise subprocess.TimeoutExpired(words, timeout_s) from None
            self._channel.settimeout(None)
            return subprocess.CompletedProcess(words, code, _read(told), _read(warned))

    def close(self) -> None:
        self._process.kill()  # between two commands
        self._process.wait()
        self._channel.close()


@cache
def _parent() -> Parent | None:
    """None: messages with files in them are those of Linux."""
    return Parent() if sys.platform == "linux" else None


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def main() -> None:
    """Fork until the other end of the channel is closed; in a child, return to be the command."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        import_module(name)
    while True:
        message, streams, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 3)
        if not message:
            sys.exit()
        if (child := os.fork()) == 0:
            break
        for stream in streams:
            os.close(stream)
        channel.send(str(child).encode())
        _, status = os.waitpid(child, 0)
        channel.send(str(os.waitstatus_to_exitcode(status)).encode())
    channel.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    words, env, folder = json.loads(message)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = [COMMAND[-1], *words]


if __name__ == "__main__":
    main()
    run()
