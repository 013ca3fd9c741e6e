"""Packed checkpoints in engines that serve many requests at once."""
