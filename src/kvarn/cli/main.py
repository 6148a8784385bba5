"""The `kvarn` command: registers the commands and turns failures into one sentence and an exit code.

0 ok, 1 failed, 2 wrong usage, 130 interrupted. A command's module is imported when the command is asked for, and other
packages inside the commands, so that `kvarn run` starts fast.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from kvarn.cli.terminal.options import flatten_options
from kvarn.config import is_debug, shorten_blas_waits
from kvarn.errors import ConfigError, InvalidParameter, KvarnError

WRONG_USAGE = 2
INTERRUPTED = 130

Command = Callable[..., None]
Place = str  # of a command: its module in this package, and its function there


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """`kvarn NAME SUBCOMMAND`."""

    help: str
    commands: Mapping[str, Place]


# Every command, in the order of `kvarn --help`.
COMMANDS: Mapping[str, Place] = {
    "run": "generate.run:run",
    "chat": "generate.chat:chat",
    "fill": "generate.fill:fill",
    "batch": "generate.batch:batch",
    "serve": "serving.serve:serve",
    "route": "serving.route:route",
    "top": "serving.top:top",
    "show": "models.show:show",
    "pull": "models.manage:pull",
    "ls": "models.manage:list_models",
    "rm": "models.manage:remove",
    "quantize": "weights.quantize:quantize",
    "imatrix": "weights.quantize:imatrix",
    "prune": "weights.prune:prune",
    "evaluate": "weights.evaluate:evaluate",
    "doctor": "doctor:doctor",
    "search": "collections.search:search",
}
GROUPS: Mapping[str, CommandGroup] = {
    "index": CommandGroup(
        "Collections of documents to search.",
        {
            "add": "collections.changes:index_add",
            "sync": "collections.sync:index_sync",
            "rm": "collections.changes:index_rm",
            "ls": "collections.listing:index_ls",
            "stats": "collections.listing:index_stats",
        },
    ),
    "bench": CommandGroup(
        "Measure this machine or a server.",
        {
            "engine": "bench.engine:bench_engine",
            "serve": "bench.serve:bench_serve",
            "model": "bench.model:bench_model",
            "make": "bench.model:bench_make",
            "diffusion": "bench.diffusion:bench_diffusion",
            "fleet": "bench.fleet:bench_fleet",
        },
    ),
    "keys": CommandGroup(
        "API keys of a server.",
        {
            "new": "serving.keys:new_key",
            "ls": "serving.keys:list_keys",
            "revoke": "serving.keys:revoke_key",
            "rm": "serving.keys:remove_key",
        },
    ),
    "cache": CommandGroup(
        "Prefixes that servers keep on disk.",
        {
            "ls": "serving.prefix_cache:list_cache",
            "verify": "serving.prefix_cache:verify_cache",
            "clear": "serving.prefix_cache:clear_cache",
        },
    ),
    "deploy": CommandGroup("A server on a cluster.", {"ray": "serving.deploy:deploy_ray"}),
    "config": CommandGroup("Settings of a server.", {"explain": "serving.config:explain_config"}),
}


class CommandTable(TyperGroup):
    """The commands by name; each is imported when it is asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys((*COMMANDS, *GROUPS))  # type: ignore[assignment]  # typos are compared with them

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        return _made(cmd_name) if cmd_name in self.commands else None


app = typer.Typer(
    name="kvarn",
    cls=CommandTable,
    help="Run language models on the machine you have.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; never returns."""
    shorten_blas_waits()
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


@functools.cache
def _made(name: str) -> Any:
    """A command or a group of commands, as typer has it."""
    if (group := GROUPS.get(name)) is None:
        return get_command(_typer(name, {name: COMMANDS[name]}))
    return get_group(_typer(name, group.commands, help=group.help, no_args_is_help=True))


def _typer(name: str, commands: Mapping[str, Place], **settings: Any) -> typer.Typer:
    made = typer.Typer(name=name, add_completion=False, rich_markup_mode=None, **settings)
    for one, place in commands.items():
        module, _, function = place.partition(":")
        made.command(one)(guarded(flatten_options(getattr(import_module(f"kvarn.cli.{module}"), function))))
    return made


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


if __name__ == "__main__":
    main()
