"""Many processes: joining them, and a parent for each that says what to do when a peer is lost."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import NoReturn

import jax

from constrainx.errors import ArgumentError, UserError

# A killed process is missed after so many seconds; JAX's default of 100 is more than a minute.
HEARTBEAT_SECONDS = 15
# Whoever is done waits for process 0, which may have a report to write. Whoever fails does not
# wait, and whoever is killed is missed by its heartbeat, so this may be long.
SHUTDOWN_SECONDS = 3600
# As a shell would have it.
ABORTED = 128 + signal.SIGABRT
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
WANTED = (
    "`--distributed` must be `auto` or `HOST:PORT,PROCESSES,INDEX`, such as `10.0.0.1:1234,2,0` on "
    "the first of two"
)


class DistributedError(UserError, RuntimeError):
    """Processes cannot be joined."""


def join(spec: str | None) -> None:
    """Joins this process to its peers; call it before anything else that uses JAX.

    >>> join(None)
    >>> join("10.0.0.1,2,0")
    Traceback (most recent call last):
    constrainx.errors.ArgumentError: `--distributed` must be `auto` or `HOST:PORT,...

    Args:
        spec: None for a process on its own; "auto" to ask SLURM, Open MPI, Kubernetes or a Cloud
            TPU; "HOST:PORT,PROCESSES,INDEX" otherwise, with the address of process 0.

    Raises:
        ValueError: the text is none of these.
        DistributedError: there is no such environment.
        RuntimeError: JAX has been used already, if only by `jax.devices()`.
    """
    if spec is None:
        return
    address, processes, index = (None, None, None) if spec == "auto" else _parsed(spec)
    try:
        jax.distributed.initialize(
            address,
            processes,
            index,
            # Given all of these, JAX has no reason to look around for a cluster.
            cluster_detection_method=None if spec == "auto" else "deactivate",
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except ValueError as error:
        if spec != "auto" or "defined" not in str(error):
            raise
        raise DistributedError(
            "`--distributed auto` found no SLURM, Open MPI, Kubernetes or Cloud TPU: start with "
            "`srun`, `mpirun` or an Indexed Job (`pip install 'jax[k8s]'`), or give the address "
            "of process 0 as `HOST:PORT,PROCESSES,INDEX`."
        ) from error
    if jax.process_index() > 0:
        # What there is to tell, process 0 tells.
        logging.getLogger("constrainx").setLevel(logging.WARNING)


@contextlib.contextmanager
def supervise(spec: str | None, *, run: pathlib.Path | str | None = None) -> Iterator[None]:
    """Joins this process to its peers for the block, in a child of this process.

    When a peer is lost, JAX aborts from a thread of its own and Python has no say. So this process
    becomes a parent that only waits: it hands signals down and the exit code up, and if the child
    was aborted it says how to go on. An error in the block ends the child without waiting for the
    peers at the exit, where they would not come, so that they miss it in turn.

    >>> with supervise(None):
    ...     pass

    Args:
        spec: see `join`; None runs the block as it is.
        run: the folder of the run, for the message.
    """
    if spec is None:
        yield
        return
    if spec != "auto":
        _parsed(spec)
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, which NumPy's BLAS has; it handles forks, and JAX has none
        # before its first use.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        os.close(reading)
        raise SystemExit(_attend(child, run))
    os.close(writing)
    # In a group of its own Ctrl-C reaches it once, by way of the parent: twice means "at once".
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, args=(reading,), daemon=True).start()
    join(spec)
    try:
        yield
    except BaseException as error:
        _leave(error)
    jax.distributed.shutdown()


def _parsed(spec: str) -> tuple[str, int, int]:
    parts = spec.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts[1:]):
        raise ArgumentError(f"{WANTED}, got {spec!r}.")
    address, processes, index = parts[0].strip(), int(parts[1]), int(parts[2])
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ArgumentError(f"{WANTED}, got the address {address!r}.")
    if not 0 <= index < processes:
        raise ArgumentError(f"{WANTED}, got process {index} of {processes}: the first is 0.")
    return address, processes, index


def _attend(child: int, run: pathlib.Path | str | None) -> int:
    """Hands down signals until the child ends; its exit code."""

    def hand_down(number: int, frame: object) -> None:
        del frame
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, hand_down)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    code = code if code >= 0 else 128 - code
    if code == ABORTED:
        sys.stderr.write(_lost(run) + "\n")
    return code


def _lost(run: pathlib.Path | str | None) -> str:
    return (
        "constrainx: a peer was lost, and JAX has ended this process; its reason is above. Start "
        f"again with `constrainx resume {run or 'RUN'}` on the processes that are left, or on any "
        "number: the last complete checkpoint is intact."
    )


def _end_with_parent(reading: int) -> None:
    """The other end of the pipe closes when the parent is gone, however that came about."""
    os.read(reading, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_from_jax(error: BaseException | None) -> bool:
    """Whether this error, or one that led to it, comes from the runtime."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None


def _leave(error: BaseException) -> NoReturn:
    """Ends the process as Python would, but without JAX's wait for peers that wait for us."""
    code: int | str | None = 1
    if isinstance(error, SystemExit):
        code = error.code
        if isinstance(code, str):
            sys.stderr.write(code + "\n")
    elif isinstance(error, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if _is_from_jax(error):
        # A collective may fail as soon as a peer is gone. If that was it, JAX aborts us before this
        # is over, and the parent has its say.
        time.sleep(2 * HEARTBEAT_SECONDS)
    if not code and jax.distributed.is_initialized():
        jax.distributed.shutdown()
    os._exit(code if isinstance(code, int) else int(code is not None))
