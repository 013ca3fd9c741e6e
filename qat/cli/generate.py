"""`qat generate`."""


def generate() -> None:
    """generate (being built)."""
