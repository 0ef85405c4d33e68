"""Event files, also when their thread dies."""

import logging

from constrainx.runtime import TensorBoard
from constrainx.runtime._tensorboard import start_writer


def test_the_threads_of_a_writer_are_found(tmp_path):
    writer, threads = start_writer(tmp_path)
    alive = [thread.is_alive() for thread in threads]
    writer.close()
    assert alive == [True], (
        "this version of tensorboardX no longer writes from one thread whose class is its own, so "
        "a full disk would block the run once its queue is full: see `start_writer`."
    )
    assert not threads[0].is_alive()


def test_events_are_written(tmp_path):
    board = TensorBoard(tmp_path)
    board.on_log(1, {"loss": 0.5, "broken": float("nan")})
    board.on_event(1, "resumed")
    board.on_end(2, "finished")
    (file,) = tmp_path.glob("events*")
    content = file.read_bytes()
    assert b"train/loss" in content
    assert b"finished" in content
    assert b"broken" not in content


class Ended:
    def is_alive(self):
        return False


def test_a_thread_that_has_died_is_reported_once_and_the_run_goes_on(tmp_path, caplog):
    board = TensorBoard(tmp_path)
    writer, board._threads = board._writer, [Ended()]
    with caplog.at_level(logging.WARNING, logger="constrainx"):
        for step in range(100):  # more than its queue holds
            board.on_log(step, {"loss": 0.5})
        board.on_end(100, "finished")
    writer.close()
    (record,) = caplog.records
    assert "TensorBoard gets no more events" in record.getMessage()


def test_without_a_thread_to_watch_events_are_still_written(tmp_path):
    board = TensorBoard(tmp_path)
    board._threads = []
    board.on_end(1, "finished")
    (file,) = tmp_path.glob("events*")
    assert b"finished" in file.read_bytes()
