"""Changes of whole batches, random for each example and epoch: augmentation of images.

What becomes of an example depends on the seed, its number in the data and the epoch, so that
resumed runs and other numbers of devices and processes see the same images.
"""

from constrainx.data.transforms._crop import RandomCrop as RandomCrop
from constrainx.data.transforms._draws import Draws as Draws
from constrainx.data.transforms._erase import RandomErasing as RandomErasing
from constrainx.data.transforms._flip import RandomFlip as RandomFlip
from constrainx.data.transforms._mix import MixImages as MixImages
from constrainx.data.transforms._normalise import Normalise as Normalise
from constrainx.data.transforms._rand_augment import RandAugment as RandAugment
from constrainx.data.transforms._resized_crop import RandomResizedCrop as RandomResizedCrop
from constrainx.data.transforms._transform import Transform as Transform
from constrainx.data.transforms._transform import Transforms as Transforms
from constrainx.data.transforms._transform import check_transforms as check_transforms
from constrainx.data.transforms._transform import cut_rows as cut_rows
