"""Figures of fault tests are written as all others are: by `speedrun/figures.py`."""

import sys
from pathlib import Path

SPEEDRUN = Path(__file__).resolve().parents[2] / "speedrun"
# a script's own folder is on the path when it is started, and no other
sys.path.append(str(SPEEDRUN))

from figures import ROOT, command, record  # noqa: E402

__all__ = ["ROOT", "command", "record"]
