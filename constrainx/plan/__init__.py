"""What a training step will cost on devices that need not exist: memory, collectives, time."""

from constrainx.plan._collectives import Collective as Collective
from constrainx.plan._collectives import find_added as find_added
from constrainx.plan._collectives import read_collectives as read_collectives
from constrainx.plan._flops import Flops as Flops
from constrainx.plan._flops import count_flops as count_flops
from constrainx.plan._hlo import count_moved_bytes as count_moved_bytes
from constrainx.plan._largest import find_largest as find_largest
from constrainx.plan._memory import Memory as Memory
from constrainx.plan._memory import read_memory as read_memory
from constrainx.plan._mesh import make_mesh as make_mesh
from constrainx.plan._mesh import parse_mesh as parse_mesh
from constrainx.plan._plan import Plan as Plan
from constrainx.plan._plan import make_plan as make_plan
from constrainx.plan._roofline import Estimate as Estimate
from constrainx.plan._roofline import estimate_time as estimate_time
from constrainx.plan._table import as_json as as_json
from constrainx.plan._table import describe as describe
from constrainx.plan._targets import TARGETS as TARGETS
from constrainx.plan._targets import Target as Target
