"""`qat convert`."""


def convert() -> None:
    """convert (being built)."""
