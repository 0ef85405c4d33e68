"""Input pipelines whose position is one number, the step."""

from constrainx.data._arrays import arrays as arrays
from constrainx.data._batches import Batches as Batches
from constrainx.data._generated import generated as generated
from constrainx.data._iterated import iterated as iterated
from constrainx.data._prefetched import Prefetched as Prefetched
from constrainx.data._prefetched import prefetched as prefetched
from constrainx.data._prepare import PreparationError as PreparationError
from constrainx.data._prepare import Prepared as Prepared
from constrainx.data._prepare import listed as listed
from constrainx.data._prepare import prepare as prepare
from constrainx.data._source import DataNotFoundError as DataNotFoundError
from constrainx.data._tfds import tfds as tfds
