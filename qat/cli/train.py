"""`qat train`."""


def train() -> None:
    """train (being built)."""
