"""Names of Milvus's collections: which of Kvarn's, and whose, each one is. Pure.

    kvarn_NAME, kvarn_NAME_facts            shared, as of `kvarn index`
    kvarnTENANT_NAME, kvarnTENANT_NAME_facts   of the keys of one tenant

Milvus takes letters, digits and underscores: every other character of a name, and the underscore, is escaped.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from kvarn.checks import short
from kvarn.errors import InvalidParameter

FACTS = "_facts"
_ESCAPED = {"_": "__", "-": "_2d", ".": "_2e"}
_OF_FACTS = re.compile(rf"((?:[A-Za-z0-9]|{'|'.join(_ESCAPED.values())})+){FACTS}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def chunks_name(name: str, tenant: str = "") -> str:
    """The collection of the chunks of one of Kvarn's collections."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter(
            f"the collection's name is {short(name)}; use 1 to 64 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit",
            field="name",
        )
    return _prefix(tenant) + "".join(_ESCAPED.get(char, char) for char in name)


def facts_name(name: str, tenant: str = "") -> str:
    """The collection of the values about it."""
    return chunks_name(name, tenant) + FACTS


def names_among(found: Iterable[str], tenant: str = "") -> list[str]:
    """Kvarn's collections of one tenant, among all that Milvus has."""
    prefix = _prefix(tenant)
    matches = [_OF_FACTS.fullmatch(one, len(prefix)) for one in found if one.startswith(prefix)]
    return sorted(_unescaped(match[1]) for match in matches if match is not None)


def _prefix(tenant: str) -> str:
    return f"kvarn{hashlib.sha256(tenant.encode()).hexdigest()[:32] if tenant else ''}_"


def _unescaped(escaped: str) -> str:
    chars = {code: char for char, code in _ESCAPED.items()}
    return re.sub("|".join(chars), lambda match: chars[match.group()], escaped)
