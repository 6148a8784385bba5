"""`KVARN_TEST_HOSTS=FILE python -m tests.server.resolving route ...`: the real command with a name service of its own.

FILE has the addresses of the host replicas.test, one a line, as they are at that moment; "fail": it does not answer.
"""

from __future__ import annotations

import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

HOST = "replicas.test"


def look_up(real: Any, hosts: Path, host: Any, *args: Any, **options: Any) -> Any:
    """As socket.getaddrinfo."""
    if host != HOST:
        return real(host, *args, **options)
    addresses = hosts.read_text(encoding="utf-8").split()
    if addresses == ["fail"]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    if not addresses:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [one for address in addresses for one in real(address, *args, **options)]


def main() -> None:
    """Run the command line."""
    from kvarn.cli.main import main as run

    socket.getaddrinfo = partial(look_up, socket.getaddrinfo, Path(os.environ["KVARN_TEST_HOSTS"]))
    run()


if __name__ == "__main__":
    main()
