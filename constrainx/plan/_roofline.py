"""How long a step takes at least: what it computes, moves and sends, over what the devices can."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from constrainx.plan._collectives import Collective
from constrainx.plan._flops import Flops, Kind
from constrainx.plan._targets import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of one step, if every device runs at the peak rates of its data sheet.

    The work is taken to be split evenly. Computing and moving overlap, sending does not.

    Attributes:
        compute: products and convolutions.
        memory: reading and writing all that a kernel reads and writes.
        links: collectives, as rings over the links of a host, or over its network.
        iterations: what was assumed of loops whose length depends on the data.
    """

    compute: float
    memory: float
    links: float
    iterations: int

    @property
    def seconds(self) -> float:
        """A lower bound; a step of a well-tuned network takes two to three times as long."""
        return max(self.compute, self.memory) + self.links


def estimate_time(
    target: Target,
    *,
    devices: int,
    flops: Flops,
    moved: tuple[int, int],
    collectives: Iterable[Collective],
    iterations: int,
) -> Estimate | None:
    """The roofline of a step, or None if the rates of the target are not known.

    Args:
        target: the kind of device.
        devices: how many.
        flops: of all devices together.
        moved: bytes of one device, in a step and in each iteration.
        collectives: of one device.
        iterations: to assume for loops whose length depends on the data.
    """
    if not target.flops:
        return None

    def compute(counts: Mapping[Kind, float]) -> float:
        return sum(count / target.flops[kind] for kind, count in counts.items()) / devices

    links = sum(
        (iterations if found.is_iterated else 1) * found.times * _send(found, target)
        for found in collectives
    )
    return Estimate(
        compute=compute(flops.once) + iterations * compute(flops.iterated),
        memory=(moved[0] + iterations * moved[1]) / target.bandwidth,
        links=links,
        iterations=iterations,
    )


def _send(found: Collective, target: Target) -> float:
    """Seconds of a ring: each device sends its share to the next, once or twice around."""
    if found.group < 2:
        return 0.0
    rounds = 2 if found.kind == "all-reduce" else 1
    rate = target.network if found.crosses_hosts else target.link
    return rounds * (found.group - 1) / found.group * found.bytes / rate
