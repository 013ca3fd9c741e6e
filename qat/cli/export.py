"""`qat export`."""


def export() -> None:
    """export (being built)."""
