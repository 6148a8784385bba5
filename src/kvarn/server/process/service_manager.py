"""What a service manager such as systemd is told (sd_notify): ready, reloading, stopping, still alive.

Datagrams to the socket that NOTIFY_SOCKET names; without one nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

from kvarn.config import notify_socket, watchdog_interval_s
from kvarn.observe.logs import with_fields

log = logging.getLogger("kvarn.server")

CONTROL = dict.fromkeys(range(32), " ")  # a new line would begin another assignment


class ServiceManager:
    """For one process."""

    def __init__(self) -> None:
        self._address = notify_socket()
        self._watchdog_s = watchdog_interval_s()

    @property
    def is_there(self) -> bool:
        return self._address is not None

    def tell_ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={status.translate(CONTROL)}")

    def tell_reloading(self) -> None:
        """Followed by tell_ready(); the time tells the manager that the signal was seen after it was sent."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def tell_stopping(self) -> None:
        self._send("STOPPING=1", "STATUS=draining")

    async def keep_watchdog(self, is_alive: Callable[[], bool]) -> None:
        """Say that the process works as often as the manager wants to hear it, for as long as it does."""
        while self._address is not None and self._watchdog_s is not None:
            if is_alive():
                self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)

    def _send(self, *assignments: str) -> None:
        if self._address is None:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.setblocking(False)
                channel.sendto("\n".join(assignments).encode(), address)
        except OSError as error:
            log.warning("the service manager was not told", extra=with_fields(error=error.strerror or str(error)))
