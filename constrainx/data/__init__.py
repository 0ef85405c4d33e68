"""Input pipelines whose only position is the step."""

from constrainx.data import transforms as transforms
from constrainx.data._arrays import arrays as arrays
from constrainx.data._batches import Batches as Batches
from constrainx.data._batches import check_integers as check_integers
from constrainx.data._digits import digits as digits
from constrainx.data._function import from_function as from_function
from constrainx.data._images import jitter_images as jitter_images
from constrainx.data._images import move_image as move_image
from constrainx.data._iterable import DataEndedError as DataEndedError
from constrainx.data._iterable import from_iterable as from_iterable
from constrainx.data._load import load_images as load_images
from constrainx.data._photographs import CentrePhotographCrop as CentrePhotographCrop
from constrainx.data._photographs import RandomPhotographCrop as RandomPhotographCrop
from constrainx.data._prefetch import Prefetched as Prefetched
from constrainx.data._prefetch import prefetch as prefetch
from constrainx.data._prepare import PreparationError as PreparationError
from constrainx.data._prepare import Prepared as Prepared
from constrainx.data._prepare import list_prepared as list_prepared
from constrainx.data._prepare import prepare as prepare
from constrainx.data._source import DamagedDataError as DamagedDataError
from constrainx.data._source import DataNotFoundError as DataNotFoundError
from constrainx.data._tfds import tfds as tfds
