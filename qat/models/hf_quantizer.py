"""Registers packed checkpoints with transformers."""


def register(_module: object) -> None:
    """Being built."""
