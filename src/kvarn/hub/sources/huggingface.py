"""Models on a Hugging Face hub: `hf:org/repo[:file-or-quant][@revision]`.

The official client lists the repository and knows endpoint, token and login; the bytes are fetched by our own
downloader, which continues partial files and checks the digests the listing gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvarn.config import hf_endpoint, hf_token
from kvarn.errors import DownloadError, KvarnError, ModelNotFound
from kvarn.hub.download.fetch_file import RemoteFile, fetch
from kvarn.hub.download.safe_paths import safe_relative
from kvarn.hub.fetch_plan import Fetched, Outline
from kvarn.hub.file_selection import SelectedFiles, select_files
from kvarn.hub.names import HubName
from kvarn.hub.progress import OnProgress
from kvarn.hub.store import StoredFile, staged_files

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LIST_TIMEOUT_S = 30.0
LOGIN_HINT = "accept the model's terms on the hub's page and set HF_TOKEN (or run `hf auth login`)"


@dataclass(frozen=True, slots=True)
class HubPlan:
    """Files of one commit of a repository."""

    repo: str
    commit: str
    selected: SelectedFiles
    files: Mapping[str, RemoteFile]  # by name in our store

    @property
    def outline(self) -> Outline:
        sizes = [file.size for file in self.files.values() if file.size is not None]
        total = sum(sizes) if len(sizes) == len(self.files) else None
        return Outline(
            source=next(iter(self.files.values())).url if len(self.files) == 1 else f"hf:{self.repo}@{self.commit}",
            version=self.commit,
            files=tuple(self.selected.folder + file for file in self.selected.files),
            download_bytes=total,
            model_bytes=total,
        )

    def fetch(self, scratch: Path, on_progress: OnProgress) -> Fetched:
        """Download file by file; complete ones survive an interruption."""
        total = self.outline.download_bytes
        done = 0
        files: list[StoredFile] = []
        for name, remote in self.files.items():
            path = staged_files(scratch) / name
            digest = fetch(remote, path, _shifted(on_progress, done, total))
            size = path.stat().st_size
            files.append(StoredFile(name, size, digest))
            done += size
        return Fetched(self.selected.entry, tuple(files))


def plan(name: HubName) -> HubPlan:
    """List a repository and choose the files of one model in it."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=hf_endpoint(), token=hf_token())
    try:
        info = api.model_info(name.repo, revision=name.revision, files_metadata=True, timeout=LIST_TIMEOUT_S)
    except Exception as error:  # the client's transport errors differ between its versions
        raise _explain(name, error) from error
    siblings = {file.rfilename: file for file in info.siblings or ()}
    selected = select_files(siblings, name.selector, f"hf:{name.repo}")
    commit = info.sha or name.revision or "main"
    files: dict[str, RemoteFile] = {}
    for file in selected.files:
        sibling = siblings[selected.folder + file]
        safe_relative(sibling.rfilename, f"hf:{name.repo}")
        sha256 = sibling.lfs.sha256 if sibling.lfs else None
        url = _url(api, info.id, selected.folder + file, commit)
        files[file] = RemoteFile(url, file, sibling.size, sha256, _headers(api), LOGIN_HINT)
    return HubPlan(info.id, commit, selected, files)


def _url(api: HfApi, repo: str, file: str, commit: str) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(repo, file, revision=commit, endpoint=api.endpoint)


def _headers(api: HfApi) -> dict[str, str]:
    from huggingface_hub import get_token

    token = api.token or get_token()
    return {"Authorization": f"Bearer {token}"} if token else {}


def _explain(name: HubName, error: Exception) -> KvarnError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return DownloadError(f"{name.repo} is gated; {LOGIN_HINT}")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(f"{name.repo} has no revision {name.revision!r}; check the part after @")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFound(
            f"no repository {name.repo!r} on the hub; check the name, or set HF_TOKEN when it is private"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return DownloadError(f"{name} is not in the store and HF_HUB_OFFLINE forbids fetching it; unset it")
    reason = str(error).strip().splitlines()
    return DownloadError(
        f"the hub cannot be asked about {name.repo} ({reason[0] if reason else type(error).__name__}); "
        "check the network and HF_ENDPOINT, or name a local model file"
    )


def _shifted(on_progress: OnProgress, before: int, total: int | None) -> OnProgress:
    return lambda done, _file_total, label: on_progress(before + done, total, label)
