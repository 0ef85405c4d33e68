"""The certificate of a run, in the run's folder."""

from __future__ import annotations

import pathlib

from constrainx.checks import Certificate
from constrainx.runtime import RunError, read_object, write_object


def record_certificate(
    folder: pathlib.Path, certificate: Certificate, *, step: int
) -> pathlib.Path:
    """Adds a certificate to ``result.json``, under the name "certificate".

    A run that has not ended has no result yet; its certificate goes to ``certificate.json``.

    Args:
        folder: of the run.
        certificate: from `certify`.
        step: of the checkpoint that was measured.

    Returns:
        The file that it was written to.

    Raises:
        RunError: the result is damaged, or the file cannot be written.
    """
    record = {"step": step, **certificate.as_record()}
    path = folder / "result.json"
    if path.exists():
        try:
            content = {**read_object(path), "certificate": record}
        except (OSError, ValueError) as error:
            raise RunError(
                f"{path} is damaged, so the certificate cannot be added to it: {error}. Repair or "
                "remove it."
            ) from error
    else:
        path = folder / "certificate.json"
        content = record
    try:
        write_object(path, content)
    except OSError as error:
        raise RunError(
            f"the certificate could not be written to {path}: {error.strerror}. Nothing else is "
            "lost."
        ) from error
    return path
