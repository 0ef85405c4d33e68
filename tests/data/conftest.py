"""Data sets on disk."""

import pytest


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    """The folder of a data set of photographs."""
    from .photographs import Photographs

    directory = tmp_path_factory.mktemp("photographs")
    Photographs(data_dir=directory, file_format="array_record").download_and_prepare()
    return directory
