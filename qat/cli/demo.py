"""`qat demo`."""


def demo() -> None:
    """demo (being built)."""
