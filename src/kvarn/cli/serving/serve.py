"""`kvarn serve`: flags become a ServerConfig; the server does the rest."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvarn.cli.serving.config import print_settings
from kvarn.cli.terminal.options import Config, EngineOptions

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        help="Path, alias, pypi:package or hf:org/repo, or id=NAME to choose what clients call it; repeat for several. "
        "The first is loaded at start, the others when they are first asked for. [default: smollm2]",
    ),
]


# readable=False: why a file cannot be read is told in our words, the same for flags, variables and the TOML file.
@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Flags of the server; those that are not given leave the setting to sources of lower precedence."""

    model: Models = None
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", metavar="NAME=PATH", help="Adapter of the first model, PEFT or GGUF; repeatable."),
    ] = None
    lora_dir: Annotated[
        Path | None, typer.Option(readable=False, help="Folder from which keys with admin = true may load more.")
    ] = None
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None
    port: Annotated[int | None, typer.Option(help="0 takes a free one. [default: 8000]")] = None
    keys: Annotated[
        Path | None,
        typer.Option(readable=False, help="TOML file of API keys, see `kvarn keys new`. [default: nobody needs one]"),
    ] = None
    limits: Annotated[
        str | None,
        typer.Option(metavar="redis://…", help="Count keys' limits in this Redis, together with all other replicas."),
    ] = None
    limits_when_away: Annotated[
        str | None,
        typer.Option(metavar="divide|closed", help="While it is away: a part for each, or none. [default: divide]"),
    ] = None
    milvus_uri: Annotated[
        str | None,
        typer.Option(metavar="http://…", help="Keep collections on this Milvus, shared with all other replicas."),
    ] = None
    milvus_token_file: Annotated[
        Path | None, typer.Option(readable=False, help="File with its token. [default: MILVUS_TOKEN, if set]")
    ] = None
    uds: Annotated[
        Path | None, typer.Option(readable=False, help="Listen on this Unix socket instead of host and port.")
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(readable=False, help="PEM file of the certificate chain: speak TLS. SIGHUP reads it again."),
    ] = None
    tls_key: Annotated[Path | None, typer.Option(readable=False, help="PEM file of its key, without a password.")] = (
        None
    )
    root_path: Annotated[
        str | None, typer.Option(metavar="/PREFIX", help="Under which a reverse proxy offers the server.")
    ] = None
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="A proxy on this machine passes requests on: close /metrics to it.")
    ] = False
    open: Annotated[bool, typer.Option("--open", help="Open the page in a browser once the server is ready.")] = False
    prefix_cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep prefixes that are used again here. [default: prefix-cache in KVARN_HOME]"
        ),
    ] = None
    prefix_cache_bytes: Annotated[
        int | None, typer.Option(metavar="N", help="Limit of that folder. [default: 2 GB, at most 5% of the free disk]")
    ] = None
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Keep no prefixes on disk; memory still does.")
    ] = False
    cluster_key: Annotated[
        Path | None,
        typer.Option(readable=False, help="File of the secret that this replica shares with `kvarn route`."),
    ] = None
    batch_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Offer /v1/files and /v1/batches, kept in this folder.")
    ] = None
    config: Config = None
    drain_delay: Annotated[
        float | None,
        typer.Option(metavar="S", help="After SIGTERM, still take requests for so many seconds. [default: 5]"),
    ] = None
    drain_timeout: Annotated[
        float | None, typer.Option(metavar="S", help="Then let what runs go on for so many. [default: 60]")
    ] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without keys: everybody may ask.")
    ] = False
    unknown_fields: Annotated[
        str | None, typer.Option(metavar="refuse|ignore", help="Request fields nobody knows. [default: refuse]")
    ] = None
    metrics_compat: Annotated[
        str | None, typer.Option(metavar="vllm", help="Also tell metrics under vLLM's names.")
    ] = None

    def settings(self) -> dict[str, Any]:
        """Values of the flags by the names of ServerConfig; None where a flag was not given."""
        return {
            "models": tuple(self.model) if self.model else None,
            "loras": tuple(self.lora) if self.lora else None,
            "lora_dir": self.lora_dir,
            "host": self.host,
            "port": self.port,
            "keys": self.keys,
            "limits": self.limits,
            "limits_when_away": self.limits_when_away,
            "milvus_uri": self.milvus_uri,
            "milvus_token_file": self.milvus_token_file,
            "uds": self.uds,
            "tls_cert": self.tls_cert,
            "tls_key": self.tls_key,
            "root_path": self.root_path,
            "behind_proxy": self.behind_proxy or None,
            "drain_delay_s": self.drain_delay,
            "drain_timeout_s": self.drain_timeout,
            "insecure": self.insecure or None,
            "unknown_fields": self.unknown_fields,
            "metrics_compat": self.metrics_compat,
            "batch_dir": self.batch_dir,
            "engine.prefix_cache_dir": None if self.prefix_cache_dir is None else str(self.prefix_cache_dir),
            "engine.cluster_key": None if self.cluster_key is None else str(self.cluster_key),
            "engine.prefix_cache_bytes": 0 if self.no_prefix_cache else self.prefix_cache_bytes,
        }


def serve(
    *,
    options: ServeOptions,
    engine: EngineOptions,
    explain: Annotated[bool, typer.Option("--explain", help="Only print every setting and who gave it.")] = False,
) -> None:
    """Answer OpenAI and Anthropic clients over HTTP, and browsers with a page to chat, until SIGTERM or Ctrl-C.

    Prints one line when the first model has computed its first token; logs are JSON on stderr. A setting is looked for
    in the flags, then in KVARN_SERVER_* variables, then in the TOML file. The page is at http://127.0.0.1:8000.

    Try: kvarn serve, then curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' -d
    '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}'
    """
    from kvarn.server.process.setting_sources import load_config

    values = options.settings() | {f"engine.{name}": value for name, value in asdict(engine).items()}
    flags = {name: value for name, value in values.items() if value is not None}
    if explain:
        return print_settings(options.config, flags)
    settings = load_config(options.config, flags)  # wrong ones are refused before the slow imports
    from kvarn.server.process.interpreter import without_collections

    with without_collections():
        from kvarn.engine.process.early import prepare_child

        prepare_child(settings.engine, len(settings.models))
        from kvarn.server.process.serve import serve as run_server

    code = run_server(settings, on_ready=_open_page if options.open else None)
    sys.stdout.flush()
    os._exit(code)  # threads that cannot be interrupted must not delay the exit


def _open_page(address: str) -> None:
    import webbrowser

    if address.startswith("unix:") or not webbrowser.open(address):
        print(f"kvarn: no browser could be opened here; open {address} in one", file=sys.stderr)
