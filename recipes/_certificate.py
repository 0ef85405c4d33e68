"""The certificate of a run, in the run's folder."""

from __future__ import annotations

import json
import os
import pathlib

from constrainx.checks import Certificate
from constrainx.runtime import RunError


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
    """
    record = {"step": step, **certificate.as_record()}
    path = folder / "result.json"
    if path.exists():
        try:
            content = json.loads(path.read_bytes())
        except ValueError as error:
            raise RunError(
                f"{path} is not JSON, so the certificate cannot be added to it: {error}. Repair or "
                "remove it."
            ) from error
        content = {**content, "certificate": record}
    else:
        path = folder / "certificate.json"
        content = record
    # Never half a file, whatever happens.
    beside = path.with_suffix(".json.new")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(beside, path)
    return path
