"""Which paths .gitignore files leave out, by the rules of gitignore(5); those above a folder, too, in a repository."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NAME = ".gitignore"


@dataclass(frozen=True, slots=True)
class IgnoreRule:
    """One line of a .gitignore file; pattern matches paths relative to that file's folder."""

    pattern: re.Pattern[str]
    is_negated: bool
    is_for_folders: bool


@dataclass(frozen=True, slots=True)
class IgnoreFile:
    """The rules of one .gitignore file. prefix: its folder relative to the root, with a slash; empty in the root.

    above: of a file above the root, the root relative to its folder, with a slash.
    """

    prefix: str
    rules: tuple[IgnoreRule, ...]
    above: str = ""

    @staticmethod
    def parse(text: str, prefix: str = "", above: str = "") -> IgnoreFile:
        rules = (_rule(line) for line in text.splitlines())
        return IgnoreFile(prefix, tuple(rule for rule in rules if rule is not None), above)

    @staticmethod
    def read(folder: Path, prefix: str = "", above: str = "") -> IgnoreFile | None:
        """The file of a folder; None if it has none."""
        path = folder / NAME
        if not path.is_file():
            return None
        return IgnoreFile.parse(path.read_text(encoding="utf-8", errors="replace"), prefix, above)


def ignore_files_above(root: Path) -> tuple[IgnoreFile, ...]:
    """Those above a folder of a git repository, from the repository's on down; the folder itself was asked for."""
    resolved = root.resolve()
    places = [resolved, *resolved.parents]
    top = next((number for number, place in enumerate(places) if (place / ".git").exists()), 0)
    found = (
        IgnoreFile.read(place, above=f"{resolved.relative_to(place).as_posix()}/")
        for place in reversed(places[1 : top + 1])
    )
    return tuple(file for file in found if file is not None)


def is_ignored(path: str, is_folder: bool, files: Sequence[IgnoreFile]) -> bool:
    """Whether a path relative to the root is left out; files: from the root down, the last rule that matches counts."""
    for file in reversed(files):
        relative = file.above + path.removeprefix(file.prefix)
        for rule in reversed(file.rules):
            if (is_folder or not rule.is_for_folders) and rule.pattern.fullmatch(relative):
                return not rule.is_negated
    return False


def _rule(line: str) -> IgnoreRule | None:
    line = re.sub(r"(?<!\\)[ \t]+$", "", line)
    if not line or line.startswith("#"):
        return None
    is_negated = line.startswith("!")
    line = line[1:] if is_negated else line.removeprefix("\\") if line.startswith(("\\#", "\\!")) else line
    is_for_folders = line.endswith("/")
    line = line.rstrip("/")
    is_anchored = "/" in line
    expression = _expression(line.lstrip("/"))
    if expression is None or not line:
        return None
    return IgnoreRule(re.compile(expression if is_anchored else f"(?:.*/)?{expression}"), is_negated, is_for_folders)


def _expression(glob: str) -> str | None:
    """A glob as a regular expression; None if it is not one, which git then matches with nothing."""
    parts, at = [], 0
    while at < len(glob):
        if glob.startswith("**/", at) and (at == 0 or glob[at - 1] == "/"):
            parts.append("(?:.*/)?")
            at += 3
        elif glob.startswith("**", at) and at + 2 == len(glob):
            parts.append(".*")
            at += 2
        elif glob[at] == "[":
            end = glob.find("]", at + 2)
            if end < 0:
                return None
            inner = glob[at + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            parts.append(f"[{'^' + inner[1:] if inner[0] in '!^' else inner}]")
            at = end + 1
        else:
            is_escaped = glob[at] == "\\" and at + 1 < len(glob)
            at += is_escaped
            wild = {} if is_escaped else {"*": "[^/]*", "?": "[^/]"}
            parts.append(wild.get(glob[at], re.escape(glob[at])))
            at += 1
    expression = "".join(parts)
    try:
        re.compile(expression)
    except re.error:
        return None
    return expression
