# Sourced by demo.sh, test.sh, setup_machine.sh and .ci/run: `setup_env EXTRA` makes .venv in the
# clone, installs the package there when something changed, and sets PYTHON. Nothing outside .venv is
# touched, unless `use_running_python` came before.
#
# With a GPU and a torch >= 2.9 that sees it (Colab, RunPod), .venv builds on that torch.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"
MARK="$VENV/.installed" # MARK-EXTRA holds the hash of what was installed
OWN_TORCH="$VENV/.base-torch" # a file that is there when PYTHON brought its torch along

say() { echo "qat: $*" >&2; }

has_version() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

has_gpu_torch() {
    "$1" - 2>/dev/null <<'PY'
import re, sys
import torch
version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
sys.exit(not (version >= (2, 9) and torch.cuda.is_available()))
PY
}

# The Python to build on: one whose torch drives a GPU, else the newest that is there.
find_python() {
    local candidate
    if has_version python3 && has_gpu_torch python3; then
        echo python3
        return
    fi
    for candidate in python3.13 python3.12 python3.11 python3 python; do
        if has_version "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    say "no Python >= 3.11 found on PATH; install one (python.org, apt, brew, pyenv) and run this again"
    return 1
}

# .venv sees the packages beside `torch` of its base, be that base a virtual environment or not.
share_packages() {
    local packages
    packages="$("$1" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')"
    echo "$packages" >"$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
}

make_venv() {
    local base
    base="$(find_python)" || return 1
    local options=()
    if has_gpu_torch "$base"; then options+=(--system-site-packages); fi
    if ! "$base" -c 'import ensurepip' 2>/dev/null; then
        if [ ${#options[@]} -eq 0 ]; then
            say "$base has no ensurepip; install its venv package (Debian: apt install python3-venv)"
            return 1
        fi
        options+=(--without-pip) # the base's own pip is seen through its packages
    fi
    "$base" -m venv --clear ${options[@]+"${options[@]}"} "$VENV" || return 1
    if has_gpu_torch "$base"; then
        share_packages "$base"
        touch "$OWN_TORCH"
    fi
}

# Installs into the python3 on PATH from now on: Colab's, whose notebooks run `!qat` there.
use_running_python() {
    PYTHON="$(command -v python3)" && has_version "$PYTHON" || return 1
    MARK="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/qat-installed"
    OWN_TORCH="$PYTHON"
}

# `torch==VERSION` of a torch >= 2.9 that PYTHON has: pip then leaves it as it is.
installed_torch() {
    "$PYTHON" - <<'PY'
import importlib.metadata as metadata, re
try:
    version = metadata.version("torch")
except metadata.PackageNotFoundError:
    version = "0"
if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= (2, 9):
    print(f"torch=={version}")
PY
}

# What an installation depends on, as one number.
installation_hash() {
    "$PYTHON" - "$ROOT" "$1" <<'PY'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
files = [root / "pyproject.toml", root / "speedrun" / "constraints.txt"]
parts = [str(root), sys.version, sys.argv[2], *(file.read_text() for file in files)]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PY
}

is_installed() { [ "$(cat "$MARK-$1" 2>/dev/null)" = "$(installation_hash "$1")" ]; }

install_package() {
    local target="$ROOT" torch=(-c "$ROOT/speedrun/constraints.txt")
    if [ "$1" != base ]; then target="$ROOT[$1]"; fi
    if [ -e "$OWN_TORCH" ]; then torch=($(installed_torch)); fi
    say "installing for $PYTHON (minutes the first time, skipped afterwards)"
    "$PYTHON" -m pip install -qq --disable-pip-version-check --no-input \
        ${torch[@]+"${torch[@]}"} -e "$target" || return 1
    installation_hash "$1" >"$MARK-$1"
}

# setup_env EXTRA: `base` for users, `dev` (which holds `base`) for the tests.
setup_env() {
    if ! has_version "$PYTHON"; then make_venv || return 1; fi
    if is_installed "$1" || is_installed dev; then return; fi
    install_package "$1"
}
