"""`kvarn bench fleet`: routers before many simulated replicas. A table, and one line of JSON, last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn.errors import ConfigError

if TYPE_CHECKING:
    from kvarn.bench.fleet.replicas import ReplicaShape
    from kvarn.bench.fleet.runs import MakeTrace
    from kvarn.bench.fleet.simulation import FleetFigures

SIZES = (2, 8, 32)
HEADINGS = ("policy", "replicas", "requests", "cached", "p50 ms", "p90 ms", "p99 ms", "spread", "choice us", "feed us")


def bench_fleet(
    *,
    replicas: Annotated[
        list[int] | None, typer.Option("--replicas", "-r", min=1, max=4096, help="Sizes of fleets. [default: 2 8 32]")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of each replica; of a recorded trace, all.")] = 1000,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests each second, of each replica.")] = 10.0,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="NAME", help="prefix, text_tree, least_loaded, round_robin. [default: all]"),
    ] = None,
    blocks: Annotated[int, typer.Option(min=16, help="KV blocks of 64 tokens, of each replica.")] = 1024,
    trace: Annotated[Path | None, typer.Option(readable=False, help="JSON lines as Mooncake publishes them.")] = None,
    real: Annotated[bool, typer.Option("--real", help="The real scheduler in each replica; at most 16.")] = False,
    seed: Annotated[int, typer.Option(help="Of the conversations.")] = 1,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the figures as curves.")] = None,
) -> None:
    """Simulate fleets: the real router and cache bookkeeping, replicas in simulated time, conversations from a seed."""
    from kvarn.bench.fleet.replicas import ReplicaShape
    from kvarn.bench.fleet.runs import MAX_REAL, run_all
    from kvarn.bench.fleet.simulation import as_json

    sizes, policies = tuple(replicas or SIZES), _policies(policy)
    if real and max(sizes) > MAX_REAL:
        raise ConfigError(f"{max(sizes)} replicas are wanted with the real scheduler; at most {MAX_REAL} are simulated")
    make_trace = _traces(trace, requests, rate, seed)
    shape = ReplicaShape(num_blocks=blocks)
    if not real:
        shape = _fitted(shape, make_trace)
    print(("{:>13}" + "{:>10}" * 9).format(*HEADINGS))
    found = []
    for one in run_all(sizes, policies, shape, make_trace, is_real=real):
        found.append(one)
        print(_table_row(one), flush=True)
    if plot is not None:
        from kvarn.bench.fleet.curves import curves

        plot.write_text(curves(found, f"{rate:g} requests/s of each replica"), encoding="utf-8")
    model = {"factor": round(shape.factor, 3), "delay_s": round(shape.delay_s, 5), "is_real": real}
    print(json.dumps({"bench": "fleet", **model, "runs": list(map(as_json, found))}))


def _policies(given: list[str] | None) -> tuple[str, ...]:
    from kvarn.bench.fleet.simulation import POLICY_NAMES

    for name in given or ():
        if name not in POLICY_NAMES:
            raise ConfigError(f"policy is {name!r:.40}; choose one of {', '.join(POLICY_NAMES)}")
    return tuple(given or POLICY_NAMES)


def _traces(path: Path | None, requests: int, rate: float, seed: int) -> MakeTrace:
    from kvarn.bench.fleet.runs import conversations
    from kvarn.bench.fleet.trace import read_trace

    return conversations(requests, rate, seed) if path is None else lambda _: read_trace(path)


def _fitted(shape: ReplicaShape, make_trace: MakeTrace) -> ReplicaShape:
    from kvarn.bench.fleet.runs import fit

    found = fit(shape, make_trace)
    real, modelled = found.real, found.modelled
    times = [1000 * one for one in (modelled.ttft_p50, modelled.ttft_p99, real.ttft_p50, real.ttft_p99)]
    print(
        f"model of a replica: factor {found.shape.factor:.2f}, delay {1000 * found.shape.delay_s:.1f} ms; first tokens "
        "p50, p99 {:.0f}, {:.0f} ms, with the real scheduler {:.0f}, {:.0f} ms; ".format(*times)
        + f"cached {modelled.hit_rate:.1%} and {real.hit_rate:.1%}"
    )
    return found.shape


def _table_row(one: FleetFigures) -> str:
    times = "".join(f"{1000 * value:>10.1f}" for value in (one.ttft_p50, one.ttft_p90, one.ttft_p99))
    counts = f"{one.policy:>13}{one.replicas:>10,}{one.requests:>10,}{one.hit_rate:>10.1%}"
    return f"{counts}{times}{one.spread:>10.2f}{one.choice_us:>10.1f}{one.feed_us:>10.1f}"
