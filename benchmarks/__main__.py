"""Runs the benchmarks: ``python -m benchmarks [adjoint] [conditioning] [solve] [--quick]``."""

from __future__ import annotations

import argparse
import pathlib

from benchmarks import (
    adjoint,
    conditioning,
    crossover,
    feasible,
    growth,
    images,
    lenet,
    loop,
    passes,
    peers,
    report,
    solve,
    step,
    sweep,
    swin,
    toy,
    twice,
)
from benchmarks.measure import clock
from constrainx.errors import did_you_mean
from constrainx.runtime import keep_memory

BENCHMARKS = {
    "adjoint": adjoint.run,
    "conditioning": conditioning.run,
    "crossover": crossover.run,
    "feasible": feasible.run,
    "growth": growth.run,
    "images": images.run,
    "lenet": lenet.run,
    "loop": loop.run,
    "passes": passes.run,
    "peers": peers.run,
    "solve": solve.run,
    "step": step.run,
    "sweep": sweep.run,
    "swin": swin.run,
    "toy": toy.run,
    "twice": twice.run,
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmarks named in ``arguments``, or in the command line, or all."""
    options = _parse(arguments)
    keep_memory()  # as the command line does
    clock.counts_processor = options.processor_time
    machine = report.machine()
    if options.processor_time:
        machine["clock"] = "processor time"
    report.print_machine(machine)
    for name in options.names or BENCHMARKS:
        report.publish(BENCHMARKS[name](quick=options.quick), machine, options.out)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures constrainx against its peers, and against doing without.",
        epilog="adjoint: time and memory of value and gradient. conditioning: accuracy against "
        "iterations, and against the condition number. solve: time of one solve on 50 million "
        "parameters, and what LSMR adds to its products with A. crossover: Gram matrix against "
        "iterations for growing numbers of rows. feasible: outputs that are moved to where "
        "constraints hold, a batch at a time. growth: time and memory of a step against "
        "parameters, rows and batch, drawn. images: augmented images a second, without a "
        "model. lenet: a row an image through convolutions. "
        "loop: the trainer against a loop written by hand. "
        "passes: how often a step with one row passes over memory, on an H100 that need not be "
        "there. "
        "peers: the null-space step against other solvers and methods, drawn. "
        "step: what constraints add to a training step. sweep: rows and γ on o3-inertia. "
        "swin: what masks and a budget add to a step of Swin-S. "
        "toy: where penalty, Lagrangian and null space end, drawn. "
        "twice: what projecting gradient and update adds to Adam on 50 million parameters.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{_list_names()}; all if left out"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("results/benchmarks"),
        metavar="DIR",
        help="where tables and plots go (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that everything runs"
    )
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count the time of the processor, not of the wall, where others use the same cores",
    )
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in BENCHMARKS:
            hint = did_you_mean(name, BENCHMARKS, cutoff=0.0)
            parser.error(f"there is no benchmark {name!r}.{hint} Choose from {_list_names()}.")
    return options


def _list_names() -> str:
    return ", ".join(BENCHMARKS)


if __name__ == "__main__":
    main()
