"""The parts of a training run: checkpoints, folder, callbacks, devices and processes."""

from constrainx.runtime._callback import Callback as Callback
from constrainx.runtime._checkpoint import CheckpointError as CheckpointError
from constrainx.runtime._checkpoint import Checkpoints as Checkpoints
from constrainx.runtime._checkpoint import Keep as Keep
from constrainx.runtime._checkpoint import by_path as by_path
from constrainx.runtime._checkpoint import has_checkpoints as has_checkpoints
from constrainx.runtime._distributed import DistributedError as DistributedError
from constrainx.runtime._distributed import join as join
from constrainx.runtime._distributed import supervise as supervise
from constrainx.runtime._json_lines import JsonLines as JsonLines
from constrainx.runtime._metric_names import REMOVED as REMOVED
from constrainx.runtime._metric_names import constraint_metric as constraint_metric
from constrainx.runtime._metric_names import parse_constraint_metric as parse_constraint_metric
from constrainx.runtime._metric_names import parse_violation_metric as parse_violation_metric
from constrainx.runtime._metric_names import violation_metric as violation_metric
from constrainx.runtime._preemption import StopRequests as StopRequests
from constrainx.runtime._preemption import listen_for_signals as listen_for_signals
from constrainx.runtime._progress_bar import Bar as Bar
from constrainx.runtime._run_folder import RunError as RunError
from constrainx.runtime._run_folder import lock_run_folder as lock_run_folder
from constrainx.runtime._run_folder import prepare_run_folder as prepare_run_folder
from constrainx.runtime._run_folder import read_config as read_config
from constrainx.runtime._sharding import Sharding as Sharding
from constrainx.runtime._tensorboard import TensorBoard as TensorBoard
from constrainx.runtime._weights_and_biases import WeightsAndBiases as WeightsAndBiases
