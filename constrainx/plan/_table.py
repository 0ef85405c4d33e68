"""A plan in words and in JSON."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from constrainx.plan._collectives import Collective
from constrainx.plan._largest import USABLE
from constrainx.plan._plan import Plan


def describe(plan: Plan) -> list[tuple[str, str]]:
    """The lines of a table, name and value."""
    memory, target = plan.memory, plan.target
    share = memory.peak / plan.capacity
    rows = [
        (
            "devices",
            f"{plan.devices} × {target.title}, data {plan.mesh['data']} × fsdp {plan.mesh['fsdp']}",
        ),
        ("batch", f"{plan.batch:,}, {plan.batch // plan.devices:,} a device"),
        ("parameters", f"{plan.parameters:,}"),
        ("state", f"{format_bytes(plan.state)}, {format_bytes(plan.state_held)} a device"),
        (
            "peak memory a device",
            f"{format_bytes(memory.peak)} of {format_bytes(plan.capacity)} ({share:.0%}); the "
            f"constraints add {format_bytes(plan.memory_added)}",
        ),
    ]
    if not plan.fits:
        rows.append(("", f"does not fit: a step should take {USABLE:.0%} at most"))
    if plan.largest_batch is not None:
        largest = plan.largest_batch
        rows.append(("largest batch", f"{largest:,}, {largest // plan.devices:,} a device"))
    rows += _describe_collectives("collectives a step", plan.collectives, is_iterated=False)
    rows += _describe_collectives("  in each iteration", plan.collectives, is_iterated=True)
    rows += _describe_collectives("the constraints add", plan.added, is_iterated=False)
    rows += _describe_collectives("  in each iteration", plan.added, is_iterated=True)
    rows += _describe_time(plan)
    return [*rows, ("compiled in", f"{plan.compile_seconds:.0f} s")]


def as_json(plan: Plan) -> dict[str, Any]:
    """All figures, by name."""
    found = dataclasses.asdict(plan)
    found["target"] = plan.target.name
    found["memory"]["peak"] = plan.memory.peak
    found["fits"] = plan.fits
    for name, collectives in (("collectives", plan.collectives), ("added", plan.added)):
        found[name] = {
            "once": _total(collectives, is_iterated=False),
            "iterated": _total(collectives, is_iterated=True),
            "arrays": [dataclasses.asdict(one) for one in collectives],
        }
    if plan.estimate is not None:
        found["estimate"]["seconds"] = plan.estimate.seconds
    return found


def format_bytes(count: float) -> str:
    """Bytes in a unit that suits them.

    >>> format_bytes(17_540_000_000)
    '17.5 GB'
    """
    sign, size = ("−" if count < 0 else ""), abs(float(count))
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{sign}{size:.3g} {unit}"
        size /= 1000
    return f"{sign}{size:.3g} TB"


def _describe_collectives(
    title: str, found: Iterable[Collective], *, is_iterated: bool
) -> list[tuple[str, str]]:
    """One line for each kind; one that says so if there is none."""
    totals = _total(found, is_iterated=is_iterated)
    if not totals:
        return [] if is_iterated else [(title, "none")]
    titles = [title] + [""] * (len(totals) - 1)
    return [
        (
            first,
            f"{kind}: {total['arrays']:,} arrays, {format_bytes(total['bytes'])}, the largest "
            f"{format_bytes(total['largest'])}",
        )
        for first, (kind, total) in zip(titles, totals.items(), strict=True)
    ]


def _total(found: Iterable[Collective], *, is_iterated: bool) -> dict[str, dict[str, int]]:
    """Arrays and bytes of each kind of collective, and the largest array."""
    totals: dict[str, dict[str, int]] = collections.defaultdict(
        lambda: {"arrays": 0, "bytes": 0, "largest": 0}
    )
    for one in found:
        if one.is_iterated == is_iterated:
            total = totals[one.kind]
            total["arrays"] += one.times
            total["bytes"] += one.times * one.bytes
            total["largest"] = max(total["largest"], one.bytes)
    return dict(sorted(totals.items()))


def _describe_time(plan: Plan) -> list[tuple[str, str]]:
    products = sum(plan.flops.once.values())
    iterated = sum(plan.flops.iterated.values())
    more = f" and {iterated / 1e12:.3g} in each iteration" if iterated else ""
    rows = [("computes", f"{products / 1e12:.3g} TFLOP{more}, on all devices")]
    found = plan.estimate
    if found is None:
        return [*rows, ("time a step", "not estimated: simulated devices share one machine")]
    loops = f", {found.iterations} iterations assumed" if iterated or plan.moved[1] else ""
    return [
        *rows,
        ("time a step", f"at least {format_seconds(found.seconds)}{loops}"),
        (
            "",
            f"the longer of computing {format_seconds(found.compute)} and memory "
            f"{format_seconds(found.memory)}, and links {format_seconds(found.links)}",
        ),
        ("", _describe_rates(plan)),
    ]


def _describe_rates(plan: Plan) -> str:
    target = plan.target
    used = {*plan.flops.once, *plan.flops.iterated}
    rates = [f"{target.flops[kind] / 1e12:.4g} TFLOP/s {kind}" for kind in sorted(used)]
    rates += [f"{target.bandwidth / 1e12:.3g} TB/s memory"]
    if plan.devices > 1:
        rates += [f"{target.link / 1e9:.0f} GB/s links"]
    if plan.devices > target.per_host:
        rates += [f"{target.network / 1e9:.0f} GB/s network"]
    return f"at {', '.join(rates)}"


def format_seconds(seconds: float) -> str:
    """Seconds in a unit that suits them.

    >>> format_seconds(0.00123)
    '1.23 ms'
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.2g} µs"
