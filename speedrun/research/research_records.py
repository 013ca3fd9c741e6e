"""Figures of research are written as all others are: by `speedrun/figures.py`, one folder up."""

import sys
from pathlib import Path

# a script's own folder is on the path when it is started, and no other
sys.path.append(str(Path(__file__).resolve().parents[1]))

from figures import ROOT, command, commit, device, record  # noqa: E402

__all__ = ["ROOT", "command", "commit", "device", "record"]
