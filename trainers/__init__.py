"""The trainer, its compiled step and its loop; and the tasks, a module each."""

from constrainx.trainers._evaluation import Evaluation as Evaluation
from constrainx.trainers._loop import NonFiniteError as NonFiniteError
from constrainx.trainers._step import OnNonFinite as OnNonFinite
from constrainx.trainers._step import Precision as Precision
from constrainx.trainers._step import State as State
from constrainx.trainers._trainer import Monitor as Monitor
from constrainx.trainers._trainer import Result as Result
from constrainx.trainers._trainer import Trainer as Trainer
