"""`kvarn top`: a server in the terminal, from its stream of /v1/live."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

import typer

from kvarn.bench.connection import Address
from kvarn.checks import why_unreadable
from kvarn.config import client_key
from kvarn.errors import ConfigError, RequestError

DEFAULT_URL = "http://127.0.0.1:8000"
MAX_LINE_BYTES = 4 << 20
MAX_KEY_BYTES = 4096


def top(
    url: Annotated[str, typer.Option("--url", help="Base URL of a Kvarn server.")] = DEFAULT_URL,
    key_file: Annotated[
        Path | None,
        typer.Option(readable=False, help="File with the API key; without it KVARN_API_KEY is used, if it is set."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one moment and end; also where the output is a file.")] = (
        False
    ),
) -> None:
    """Watch a server: requests, steps, the KV cache block by block, models in memory.

    Your own requests are shown one by one, those of other keys as counts. Ctrl-C ends it.

    Try: kvarn top --url http://127.0.0.1:8000
    """
    from rich.console import Console
    from rich.live import Live

    from kvarn.cli.serving.top_view import rendered

    key = client_key() if key_file is None else read_key(key_file)
    console = Console(highlight=False)
    frames = _frames(Address.of(url), key)
    if once or not sys.stdout.isatty():
        console.print(rendered(next(frames), console.width))
        return
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        for frame in frames:
            screen.update(rendered(frame, console.width), refresh=True)


def read_key(path: Path) -> str:
    """The API key in a file."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_KEY_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"key file {path} cannot be read: {why_unreadable(path, error)}") from None
    if not re.fullmatch(r"[!-~]+", text):
        raise ConfigError(
            f"key file {path} has no key on one line; write the key that `kvarn keys new` printed into it"
        )
    return text


def _frames(address: Address, key: str | None) -> Iterator[dict[str, Any]]:
    """Frames without end: a stream that has ended is asked for again."""
    from kvarn.cli.generate.remote import open_response

    while True:
        connection, response = open_response(address, key, "GET", "/v1/live")
        try:
            while line := response.readline(MAX_LINE_BYTES):
                if line.startswith(b"data:") and (frame := _parsed(line)) is not None:
                    yield frame
        except (OSError, HTTPException, ValueError) as error:
            raise RequestError(f"the stream of {address.host_header} broke off ({error}); start again") from None
        finally:
            connection.close()


def _parsed(line: bytes) -> dict[str, Any] | None:
    data = line.removeprefix(b"data:").strip()
    if data == b"[DONE]":
        return None
    frame = json.loads(data)
    if not isinstance(frame, dict) or frame.get("object") != "live":
        raise RequestError("the server's /v1/live is none of Kvarn's; give the --url of a Kvarn server")
    return frame
