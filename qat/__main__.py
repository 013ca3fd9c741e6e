"""Run the command line: `python -m qat` is `qat`."""

from qat.cli import main

main()
