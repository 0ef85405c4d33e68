"""Measured comparisons of `constrainx.linalg` with its peers: ``python -m benchmarks``."""
