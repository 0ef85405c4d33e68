"""Joins processes, and gives each a parent that explains how to resume when a peer is lost."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import NoReturn

import jax

from constrainx.errors import ArgumentError, UserError
from constrainx.runtime._preemption import PASSED_ON

# Seconds until a killed process is noticed. JAX's default of 100 is too long to wait.
HEARTBEAT_SECONDS = 15
# Seconds that processes wait for each other at the start.
JOIN_SECONDS = 120
# Seconds that a finished process waits for process 0, which may still write a report. Processes
# that fail do not wait and those that are killed miss a heartbeat, so this may be long.
SHUTDOWN_SECONDS = 3600
# The exit code that a shell reports.
ABORTED = 128 + signal.SIGABRT
# Of a run that was asked to stop, if a scheduler is to start it again: EX_TEMPFAIL.
STOPPED = 75
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# JAX's own variable, for process 0 behind an address that its machine does not have.
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
SPEC_RULE = (
    "`--distributed` must be `auto` or `HOST:PORT,PROCESSES,INDEX`, such as `10.0.0.1:1234,2,0` on "
    "the first of two"
)


class DistributedError(UserError, RuntimeError):
    """Processes cannot be joined."""


def join(spec: str | None) -> None:
    """Joins this process to its peers. Call it before anything else that uses JAX.

    >>> join(None)
    >>> join("10.0.0.1,2,0")
    Traceback (most recent call last):
    constrainx.errors.ArgumentError: `--distributed` must be `auto` or `HOST:PORT,...

    Args:
        spec: None for a process on its own; "auto" to ask SLURM, Open MPI, Kubernetes or a Cloud
            TPU; "HOST:PORT,PROCESSES,INDEX" otherwise, with the address of process 0.

    Raises:
        ValueError: `spec` is none of these.
        DistributedError: "auto" found no such environment, or process 0 cannot listen there.
        RuntimeError: JAX has been used already, if only by `jax.devices()`.
    """
    if spec is None:
        return
    address, processes, index = (None, None, None) if spec == "auto" else _parse(spec)
    # JAX would listen on every interface of the machine, to anybody.
    bind = os.environ.get(BIND_ADDRESS) or address
    if index == 0 and address is not None and bind is not None:
        _check_bind(bind)
    try:
        jax.distributed.initialize(
            address,
            processes,
            index,
            # With all of these given, JAX need not look for a cluster.
            cluster_detection_method=None if spec == "auto" else "deactivate",
            initialization_timeout=JOIN_SECONDS,
            coordinator_bind_address=bind,
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
        # Process 0 logs for all of them.
        logging.getLogger("constrainx").setLevel(logging.WARNING)


@contextlib.contextmanager
def supervise(spec: str | None, *, run: pathlib.Path | str | None = None) -> Iterator[None]:
    """Runs the block in a child process that is joined to its peers.

    When a peer is lost, JAX aborts the process from a thread, and Python code gets no chance to say
    anything. So this process only waits for its child: it passes signals on, returns the child's
    exit code, and explains how to resume if the child was aborted. If the block raises, the child
    exits without waiting for its peers, which would never arrive; they then notice that it is gone.

    >>> with supervise(None):
    ...     pass

    Args:
        spec: see `join`; None runs the block in this process.
        run: the folder of the run, for the message.
    """
    if spec is None:
        yield
        return
    if spec != "auto":
        _parse(spec)
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    has_joined, tell_joined = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of forking with threads. Those here belong to NumPy's BLAS, which can
        # handle it; JAX starts none before its first use.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        os.close(reading)
        os.close(tell_joined)
        raise SystemExit(_supervise_child(child, run, spec, has_joined, writing))
    os.close(writing)
    os.close(has_joined)
    # The parent says what there is to say about a signal.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # In its own process group, Ctrl-C reaches the child only through the parent. Otherwise it would
    # arrive twice, which means "stop at once".
    os.setpgid(0, 0)
    threading.Thread(target=_hear_parent, args=(reading,), daemon=True).start()
    join(spec)
    os.write(tell_joined, b"j")
    try:
        yield
    except BaseException as error:
        _exit_with(error)
    jax.distributed.shutdown()


def _parse(spec: str) -> tuple[str, int, int]:
    parts = spec.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts[1:]):
        raise ArgumentError(f"{SPEC_RULE}, got {spec!r}.")
    address, processes, index = parts[0].strip(), int(parts[1]), int(parts[2])
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ArgumentError(f"{SPEC_RULE}, got the address {address!r}.")
    if not 0 <= index < processes:
        raise ArgumentError(f"{SPEC_RULE}, got process {index} of {processes}: the first is 0.")
    return address, processes, index


def _check_bind(address: str) -> None:
    """Raises unless this machine can listen at an address; JAX would abort instead."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise DistributedError(
            f"process 0 cannot listen at {address}: {error.strerror}. Give an address of its own "
            f"machine and a free port, or where to listen instead by the variable {BIND_ADDRESS}."
        ) from error


def _supervise_child(
    child: int, run: pathlib.Path | str | None, spec: str, has_joined: int, writing: int
) -> int:
    """Passes signals on until the child ends, and returns its exit code."""

    def pass_on(number: int, frame: object) -> None:
        del frame
        with contextlib.suppress(ProcessLookupError, BrokenPipeError):
            os.kill(child, number)
            if number == signal.SIGTERM:
                # JAX hides it from Python in the child, which may wait for data.
                os.write(writing, b"s")

    for number in FORWARDED:
        signal.signal(number, pass_on)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    code = code if code >= 0 else 128 - code
    was_joined = os.read(has_joined, 1) == b"j"
    if code == ABORTED:
        sys.stderr.write((_explain_lost_peer(run) if was_joined else _explain_absent(spec)) + "\n")
    elif code == 128 + signal.SIGTERM and not was_joined:
        sys.stderr.write(
            "constrainx: ended by SIGTERM while waiting for the other processes. Nothing had been "
            "trained, and nothing is lost.\n"
        )
    return code


def _explain_absent(spec: str) -> str:
    whom = "all processes of the job"
    if spec != "auto":
        address, processes, _ = _parse(spec)
        whom = f"all {processes} processes at {address}"
    return (
        f"constrainx: the processes did not find each other within {JOIN_SECONDS} s. Start {whom}, "
        "each with its own index, and see that they reach that address: no firewall between, "
        "process 0 running. Nothing had been trained."
    )


def _explain_lost_peer(run: pathlib.Path | str | None) -> str:
    return (
        "constrainx: a peer was lost, and JAX has ended this process; its reason is above. Start "
        f"again with `constrainx resume {run or 'RUN'}` on the processes that are left, or on any "
        "number: the last complete checkpoint is intact."
    )


def _hear_parent(reading: int) -> None:
    """Notes signals that the parent passes on, and kills this process when the parent is gone."""
    while os.read(reading, 1):
        PASSED_ON.set()
    os.kill(os.getpid(), signal.SIGKILL)


def _is_from_jax(error: BaseException | None) -> bool:
    """Whether this error, or one that caused it, comes from JAX's runtime."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None


def _exit_with(error: BaseException) -> NoReturn:
    """Ends the process as Python would, but without waiting for peers, as JAX would at exit."""
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
        # A collective may fail as soon as a peer is gone. If that is the cause, JAX aborts this
        # process within the time below, and the parent explains what happened.
        time.sleep(2 * HEARTBEAT_SECONDS)
    # All processes stop together, so nobody waits in vain.
    if code in (None, 0, STOPPED) and jax.distributed.is_initialized():
        jax.distributed.shutdown()
    os._exit(code if isinstance(code, int) else int(code is not None))
