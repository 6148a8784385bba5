"""The `kvarn` command: registers the commands and turns failures into one sentence and an exit code.

0 ok, 1 failed, 2 wrong usage, 130 interrupted. Modules of other packages are imported inside the commands, so that
`kvarn run` starts fast.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvarn.cli.bench.commands import bench_engine, bench_serve
from kvarn.cli.bench.diffusion import bench_diffusion
from kvarn.cli.bench.model import bench_make, bench_model
from kvarn.cli.doctor import doctor
from kvarn.cli.documents import index_add, index_ls, index_rm, index_stats, search
from kvarn.cli.generate.chat import chat
from kvarn.cli.generate.run import run
from kvarn.cli.models.manage import list_models, pull, remove
from kvarn.cli.models.show import show
from kvarn.cli.serving.config import explain_config
from kvarn.cli.serving.keys import list_keys, new_key, revoke_key
from kvarn.cli.serving.serve import serve
from kvarn.config import is_debug
from kvarn.errors import ConfigError, InvalidParameter, KvarnError

WRONG_USAGE = 2
INTERRUPTED = 130

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
    """Put nothing in the place of streams the caller closed (`>&-`): Python leaves None there."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - stays open as long as the process
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Let no failure of a command end in a traceback, unless KVARN_DEBUG asks for it."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader has gone, as with `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        except (typer.Exit, typer.Abort, typer.BadParameter):  # typer's own words
            raise
        except Exception as error:
            if is_debug():
                raise
            print(f"kvarn: {_sentence(error)}", file=sys.stderr)
            raise SystemExit(WRONG_USAGE if isinstance(error, ConfigError | InvalidParameter) else 1) from None

    return wrapper


def _sentence(error: BaseException) -> str:
    from kvarn.cli.terminal.text import printable, system_sentence

    if isinstance(error, MemoryError) and not str(error):
        return "out of memory; set a smaller context= or use a smaller model"
    if isinstance(error, OSError):
        return system_sentence(error)
    text = printable(" ".join(str(error).split()))
    if isinstance(error, KvarnError | MemoryError):
        return text
    return f"internal error, {type(error).__name__}: {text}; KVARN_DEBUG=1 shows where"


def _version(is_wanted: bool) -> None:
    if is_wanted:
        import kvarn

        print(f"kvarn {kvarn.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command("run")(guarded(run))
app.command("chat")(guarded(chat))
app.command("serve")(guarded(serve))
app.command("show")(guarded(show))
app.command("pull")(guarded(pull))
app.command("ls")(guarded(list_models))
app.command("rm")(guarded(remove))
app.command("doctor")(guarded(doctor))
app.command("search")(guarded(search))

index = typer.Typer(help="Collections of documents to search.", no_args_is_help=True, rich_markup_mode=None)
index.command("add")(guarded(index_add))
index.command("rm")(guarded(index_rm))
index.command("ls")(guarded(index_ls))
index.command("stats")(guarded(index_stats))
app.add_typer(index, name="index")

bench = typer.Typer(help="Measure this machine or a server.", no_args_is_help=True, rich_markup_mode=None)
bench.command("engine")(guarded(bench_engine))
bench.command("serve")(guarded(bench_serve))
bench.command("model")(guarded(bench_model))
bench.command("make")(guarded(bench_make))
bench.command("diffusion")(guarded(bench_diffusion))
app.add_typer(bench, name="bench")

keys = typer.Typer(help="API keys of a server.", no_args_is_help=True, rich_markup_mode=None)
keys.command("new")(guarded(new_key))
keys.command("ls")(guarded(list_keys))
keys.command("revoke")(guarded(revoke_key))
app.add_typer(keys, name="keys")

config = typer.Typer(help="Settings of a server.", no_args_is_help=True, rich_markup_mode=None)
config.command("explain")(guarded(explain_config))
app.add_typer(config, name="config")

if __name__ == "__main__":
    main()
