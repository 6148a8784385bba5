"""The answers of a batch, one line each in a file that outlives the process: what is in it is never asked again.

A line is written whole by one call or cut off at the next start, so that after kill -9 every request has one answer or
none. Lines come in the order in which answers end.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from kvarn.errors import ConfigError
from kvarn.server.batches.lines import BatchLine, BrokenLine
from kvarn.server.http.json_body import write_json

OK = 200


class AnswerLog:
    """Opens or makes the file; one process at a time may have it. For one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_failed = 0
        self._answered: set[str] = set()  # custom_ids
        self._broken: set[int] = set()  # numbers of lines that are no requests
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            os.close(self._fd)
            raise ConfigError(f"{path} is being written by another process; wait for it, or give another") from None
        except BaseException:
            os.close(self._fd)
            raise

    def __len__(self) -> int:
        return len(self._answered) + len(self._broken)

    def __enter__(self) -> AnswerLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.fsync(self._fd)
        os.close(self._fd)

    def has(self, line: BatchLine | BrokenLine) -> bool:
        """Whether the line was answered before."""
        return line.number in self._broken if isinstance(line, BrokenLine) else line.custom_id in self._answered

    def add_answer(self, line: BatchLine, status: int, request_id: str, body: bytes) -> None:
        """Keep the response to a request, whatever its status."""
        assert line.custom_id not in self._answered
        told = {"id": f"batch_req_{request_id}", "custom_id": line.custom_id}
        response = b'{"status_code":%d,"request_id":%s,"body":%s}' % (status, json.dumps(request_id).encode(), body)
        self._append(write_json(told)[:-1] + b',"response":' + response + b',"error":null}')
        self._answered.add(line.custom_id)
        self.num_failed += status != OK

    def add_broken(self, line: BrokenLine) -> None:
        """Keep why a line was not run."""
        error = {"code": line.code, "message": line.message, "line": line.number}
        told = {"id": f"batch_req_line_{line.number}", "custom_id": line.custom_id, "response": None, "error": error}
        self._append(write_json(told))
        self._broken.add(line.number)
        self.num_failed += 1

    def _append(self, line: bytes) -> None:
        data = memoryview(line + b"\n")
        try:
            while data:  # a full disk raises after a part: the next start cuts it off
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            error.filename = str(self.path)
            raise

    def _read(self) -> None:
        """Note what was answered, and cut off a line that was not written to its end."""
        num_whole = 0
        with open(os.dup(self._fd), "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                self._note(line, number)
                num_whole += len(line)
        os.ftruncate(self._fd, num_whole)

    def _note(self, line: bytes, number: int) -> None:
        try:
            told: dict[str, Any] = json.loads(line)
            if told["error"] is not None:
                self._broken.add(told["error"]["line"])
                self.num_failed += 1
            else:
                self._answered.add(told["custom_id"])
                self.num_failed += told["response"]["status_code"] != OK
        except (ValueError, KeyError, TypeError):
            words = "is no answer of a batch; give the file of an earlier run, or one that does not exist"
            raise ConfigError(f"line {number} of {self.path} {words}") from None
