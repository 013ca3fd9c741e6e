"""`qat report`."""


def report() -> None:
    """report (being built)."""
