"""Base URLs of replicas and servers, as they are given on the command line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvarn.bench.connection import Address
from kvarn.errors import ConfigError
from kvarn.server.router.upstream import ReplicaAddress


@pytest.mark.parametrize("of", [ReplicaAddress.of, Address.of])
@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example", "ü..x"])
def test_a_name_that_nobody_could_look_up_is_refused_at_once(of: Callable[[str], object], host: str) -> None:
    with pytest.raises(ConfigError, match="give one such as"):
        of(f"http://{host}:8000")


def test_names_in_other_scripts_and_addresses_are_read() -> None:
    assert [ReplicaAddress.of(f"http://{host}:80").host for host in ("ü.example", "[::1]", "127.0.0.1")] == [
        "ü.example",
        "::1",
        "127.0.0.1",
    ]
