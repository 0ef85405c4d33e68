"""The trainer, its compiled step and its loop; and the tasks, a module each."""

from constrainx.trainers._abstract import forget_values as forget_values
from constrainx.trainers._clock import StepClock as StepClock
from constrainx.trainers._learning_rate import LearningRate as LearningRate
from constrainx.trainers._loop import Ending as Ending
from constrainx.trainers._loop import NonFiniteError as NonFiniteError
from constrainx.trainers._polish import Polish as Polish
from constrainx.trainers._program import OnNonFinite as OnNonFinite
from constrainx.trainers._program import Precision as Precision
from constrainx.trainers._recalibrate import recalibrate as recalibrate
from constrainx.trainers._settings import Devices as Devices
from constrainx.trainers._settings import Evaluation as Evaluation
from constrainx.trainers._settings import Logging as Logging
from constrainx.trainers._settings import Monitor as Monitor
from constrainx.trainers._settings import OnSaveError as OnSaveError
from constrainx.trainers._settings import RunFolder as RunFolder
from constrainx.trainers._state import State as State
from constrainx.trainers._trainer import Result as Result
from constrainx.trainers._trainer import Trainer as Trainer
