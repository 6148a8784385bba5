"""The commit-msg hook: `area: imperative`, at most 72 characters. Run with the file that holds the message."""

from __future__ import annotations

import re
import sys
from pathlib import Path

MAX_CHARACTERS = 72
SUBJECT = re.compile(r"(?:[a-z][\w/-]*(?:, [a-z][\w/-]*)*: \S.*[^.]|(?:Merge|Revert) .+)")


def complaint(message: str) -> str | None:
    """What is wrong with the subject of a commit message; None: nothing."""
    subject = message.partition("\n")[0]
    if len(subject) > MAX_CHARACTERS:
        return f"the subject has {len(subject)} characters; at most {MAX_CHARACTERS}, the rest belongs into the body"
    if not SUBJECT.fullmatch(subject):
        return f"the subject is {subject!r}; write `area: imperative` without a full stop, such as `kv: share blocks`"
    return None


if __name__ == "__main__":
    sys.exit(complaint(Path(sys.argv[1]).read_text(encoding="utf-8")))
