"""A data set of photographs of many sizes, in the layout of TFDS."""

import io

import numpy as np
import tensorflow_datasets
from PIL import Image
from tensorflow_datasets.core import registered

EXAMPLES = 14


def make_image(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def write_png(image):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def make_photograph(number):
    return make_image((9 + 5 * (number % 3), 9 + 4 * (number % 4), 3), seed=number)


with registered.skip_registration():

    class Photographs(tensorflow_datasets.core.GeneratorBasedBuilder):
        """Photographs of many sizes."""

        name = "photographs"
        VERSION = tensorflow_datasets.core.Version("1.0.0")
        # There are no checksums beside this file.
        code_path = None

        def _info(self):
            features = {
                "image": tensorflow_datasets.features.Image(shape=(None, None, 3)),
                "label": tensorflow_datasets.features.Scalar(np.int64),
                "file_name": tensorflow_datasets.features.Text(),
            }
            return tensorflow_datasets.core.DatasetInfo(
                builder=self,
                features=tensorflow_datasets.features.FeaturesDict(features),
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i in range(EXAMPLES):
                image = write_png(make_photograph(i))
                yield i, {"image": image, "label": i, "file_name": f"{i}.png"}
