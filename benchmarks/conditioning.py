"""placeholder."""


def run(*, quick): ...
