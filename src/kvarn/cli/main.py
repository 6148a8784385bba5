"""The `kvarn` command: registers the commands and turns failures into one sentence and an exit code.

0 ok, 1 failed, 2 wrong usage, 130 interrupted. Modules of other packages are imported inside the commands, so that
`kvarn run` starts fast.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvarn.cli.bench.diffusion import bench_diffusion
from kvarn.cli.bench.engine import bench_engine
from kvarn.cli.bench.fleet import bench_fleet
from kvarn.cli.bench.model import bench_make, bench_model
from kvarn.cli.bench.serve import bench_serve
from kvarn.cli.collections.changes import index_add, index_rm
from kvarn.cli.collections.listing import index_ls, index_stats
from kvarn.cli.collections.search import search
from kvarn.cli.collections.sync import index_sync
from kvarn.cli.doctor import doctor
from kvarn.cli.generate.batch import batch
from kvarn.cli.generate.chat import chat
from kvarn.cli.generate.fill import fill
from kvarn.cli.generate.run import run
from kvarn.cli.models.manage import list_models, pull, remove
from kvarn.cli.models.show import show
from kvarn.cli.serving.config import explain_config
from kvarn.cli.serving.deploy import deploy_ray
from kvarn.cli.serving.keys import list_keys, new_key, remove_key, revoke_key
from kvarn.cli.serving.prefix_cache import clear_cache, list_cache, verify_cache
from kvarn.cli.serving.route import route
from kvarn.cli.serving.serve import serve
from kvarn.cli.serving.top import top
from kvarn.cli.terminal.options import flatten_options
from kvarn.cli.weights.evaluate import evaluate
from kvarn.cli.weights.prune import prune
from kvarn.cli.weights.quantize import imatrix, quantize
from kvarn.config import is_debug
from kvarn.errors import ConfigError, InvalidParameter, KvarnError

WRONG_USAGE = 2
INTERRUPTED = 130

Command = Callable[..., None]


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """`kvarn NAME SUBCOMMAND`."""

    help: str
    commands: Mapping[str, Command]


# Every command, in the order of `kvarn --help`.
COMMANDS: Mapping[str, Command] = {
    "run": run,
    "chat": chat,
    "fill": fill,
    "batch": batch,
    "serve": serve,
    "route": route,
    "top": top,
    "show": show,
    "pull": pull,
    "ls": list_models,
    "rm": remove,
    "quantize": quantize,
    "imatrix": imatrix,
    "prune": prune,
    "evaluate": evaluate,
    "doctor": doctor,
    "search": search,
}
GROUPS: Mapping[str, CommandGroup] = {
    "index": CommandGroup(
        "Collections of documents to search.",
        {"add": index_add, "sync": index_sync, "rm": index_rm, "ls": index_ls, "stats": index_stats},
    ),
    "bench": CommandGroup(
        "Measure this machine or a server.",
        {
            "engine": bench_engine,
            "serve": bench_serve,
            "model": bench_model,
            "make": bench_make,
            "diffusion": bench_diffusion,
            "fleet": bench_fleet,
        },
    ),
    "keys": CommandGroup(
        "API keys of a server.", {"new": new_key, "ls": list_keys, "revoke": revoke_key, "rm": remove_key}
    ),
    "cache": CommandGroup(
        "Prefixes that servers keep on disk.", {"ls": list_cache, "verify": verify_cache, "clear": clear_cache}
    ),
    "deploy": CommandGroup("A server on a cluster.", {"ray": deploy_ray}),
    "config": CommandGroup("Settings of a server.", {"explain": explain_config}),
}

app = typer.Typer(
    name="kvarn",
    help="Run language models on the machine you have.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; never returns."""
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    guarded(app.__call__)()


def _open_missing_streams() -> None:
    """Open the null device in the place of streams that the caller closed (`>&-`), for which Python has None."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - stays open as long as the process
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def guarded(command: Command) -> Command:
    """Turn every failure of a command into one line on stderr and an exit code; KVARN_DEBUG shows the traceback."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader has closed its end, as with `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        except (typer.Exit, typer.Abort, typer.BadParameter):  # typer prints these itself
            raise
        except Exception as error:
            if is_debug():
                raise
            print(f"kvarn: {_error_text(error)}", file=sys.stderr)
            raise SystemExit(WRONG_USAGE if isinstance(error, ConfigError | InvalidParameter) else 1) from None

    return wrapper


def _error_text(error: BaseException) -> str:
    from kvarn.cli.terminal.text import os_error_text, printable

    if isinstance(error, MemoryError) and not str(error):
        return "out of memory; set a smaller context= or use a smaller model"
    if isinstance(error, OSError):
        return os_error_text(error)
    text = printable(" ".join(str(error).split()))
    if isinstance(error, KvarnError | MemoryError):
        return text
    return f"internal error, {type(error).__name__}: {text}; KVARN_DEBUG=1 shows where"


def _register_all() -> None:
    _register(app, COMMANDS)
    for name, group in GROUPS.items():
        subcommands = typer.Typer(help=group.help, no_args_is_help=True, rich_markup_mode=None)
        _register(subcommands, group.commands)
        app.add_typer(subcommands, name=name)


def _register(target: typer.Typer, commands: Mapping[str, Command]) -> None:
    for name, command in commands.items():
        target.command(name)(guarded(flatten_options(command)))


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        import kvarn

        print(f"kvarn {kvarn.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


_register_all()

if __name__ == "__main__":
    main()
