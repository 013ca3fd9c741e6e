"""`qat eval`."""


def evaluate() -> None:
    """eval (being built)."""
