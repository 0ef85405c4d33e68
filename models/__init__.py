"""Flax NNX networks."""
