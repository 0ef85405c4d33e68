"""Job files that hand a training run to a scheduler, and their submission."""

from constrainx.launch._job import Job as Job
from constrainx.launch._job import Scheduler as Scheduler
from constrainx.launch._kubernetes import Kubernetes as Kubernetes
from constrainx.launch._skypilot import SkyPilot as SkyPilot
from constrainx.launch._slurm import Slurm as Slurm
from constrainx.launch._submit import SubmissionError as SubmissionError
from constrainx.launch._submit import submit as submit
