"""Writes the golden losses anew, after a change that means to move them.

python tests/golden/renew.py
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from train_case import golden_course, make_place  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        place = make_place(Path(scratch))
        course = golden_course(place, place / "run")
    (HERE / "train_20.json").write_text(json.dumps(course, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
