"""The training loop and what it compiles."""

from constrainx.trainers.loop import NonFiniteError as NonFiniteError
from constrainx.trainers.trainer import Monitor as Monitor
from constrainx.trainers.trainer import Result as Result
from constrainx.trainers.trainer import Trainer as Trainer
