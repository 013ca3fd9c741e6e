#!/usr/bin/env bash
# From a fresh clone to the demo's table, in an environment of its own. Arguments go to `qat demo`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env base
cd "$ROOT"
exec "$VENV/bin/qat" demo "$@"
