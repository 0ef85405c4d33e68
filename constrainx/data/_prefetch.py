"""Reads ahead in a background thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from constrainx.errors import ArgumentError, ArgumentTypeError

Item = TypeVar("Item")
# Seconds between checks whether to keep waiting, and how long `close` waits for the thread.
LOOK_EVERY, CLOSE_WITHIN = 0.1, 2.0


class _End(NamedTuple):
    """The last item in the queue, with the error that ended the iterator, if there was one."""

    error: BaseException | None


class Prefetched(Iterator[Item], Generic[Item]):
    """An iterator whose next items a thread has ready. Made by `prefetch`."""

    def __init__(self, iterator: Iterator[Item], *, size: int) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(size)
        self._stop = threading.Event()
        self._ended = False
        # The thread must not refer to self: an iterator that is dropped without `close` would never
        # be collected, and its thread would never end.
        self._thread = threading.Thread(
            target=_fill,
            args=(iterator, self._queue, self._stop),
            name="constrainx-prefetch",
            daemon=True,
        )
        self._thread.start()

    def __next__(self) -> Item:
        if self._ended:
            raise StopIteration
        item = self._queue.get()
        if not isinstance(item, _End):
            return item
        self._ended = True
        if item.error is not None:
            raise item.error
        raise StopIteration

    def wait(self, *, unless: Callable[[float], bool]) -> bool:
        """Waits for the next item; returns whether it is there.

        Args:
            unless: called repeatedly with the seconds waited so far; returns whether to give up.
        """
        start = time.monotonic()
        while not self._ended and self._queue.empty():
            if unless(time.monotonic() - start):
                return False
            with self._queue.not_empty:
                if not self._queue.queue:
                    self._queue.not_empty.wait(LOOK_EVERY)
        return True

    def close(self) -> None:
        """Ends the thread, which closes the iterator. May be called twice.

        A thread that is stuck in the iterator is left behind: it ends if the iterator ever returns.
        """
        self._ended = True
        self._stop.set()
        _empty(self._queue)
        self._thread.join(CLOSE_WITHIN)
        _empty(self._queue)

    def __del__(self) -> None:
        # Not there if `__init__` failed.
        if hasattr(self, "_stop"):
            self._stop.set()


def prefetch(iterator: Iterator[Item], *, size: int = 2) -> Prefetched[Item]:
    """Keeps the next ``size`` items of an iterator ready, in a background thread.

    An error in the iterator is raised in place of the item that it prevented.

    Args:
        iterator: must not be used elsewhere afterwards.
        size: the number of items to keep ready; the thread may be making one more.

    >>> import contextlib, constrainx.data
    >>> with contextlib.closing(constrainx.data.prefetch(iter("abc"))) as letters:
    ...     print(*letters)
    a b c
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ArgumentError(
            f"`size` must be a whole number of items, 1 or more, got {size!r}. To read without a "
            "thread, use the iterator itself."
        )
    if not hasattr(iterator, "__next__"):
        raise ArgumentTypeError(
            f"`iterator` must be an iterator, got {type(iterator).__name__}. Pass iter(...) of it."
        )
    return Prefetched(iterator, size=size)


def _fill(iterator: Iterator[Any], ready: queue.Queue[Any], stop: threading.Event) -> None:
    end = _End(None)
    try:
        for item in iterator:
            _put(item, ready, stop)
            if stop.is_set():
                break
    except BaseException as error:
        end = _End(error)
    _put(end, ready, stop)
    # Closed here, because no other thread may close it while this one is inside the iterator.
    if hasattr(iterator, "close"):
        iterator.close()


def _put(item: Any, ready: queue.Queue[Any], stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            ready.put(item, timeout=0.1)
            return
        except queue.Full:
            continue


def _empty(ready: queue.Queue[Any]) -> None:
    while True:
        try:
            ready.get_nowait()
        except queue.Empty:
            return
