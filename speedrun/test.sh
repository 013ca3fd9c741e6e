#!/usr/bin/env bash
# From a fresh clone to the tests, in an environment of its own. Arguments go to pytest:
# `-m slow` for the tests that take long, `-m gpu -n 0` for those that need a GPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env dev
cd "$ROOT"
unset PYTHONDONTWRITEBYTECODE # each process would compile some 700 files anew
exec "$PYTHON" -m pytest -n auto --maxprocesses 4 --dist worksteal "$@"
