"""One file an experiment: everything that defines a run."""
