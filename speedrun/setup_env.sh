# Sourced by demo.sh, test.sh, setup_machine.sh and .ci/run: `setup_env EXTRA` makes .venv in the
# clone, installs the package there when something changed, and sets PYTHON. Nothing outside .venv is
# touched, unless `use_running_python` came before.
#
# `setup_env EXTRA LOCK` first installs what LOCK lists, each file only if its hash is one of those
# listed. locked.txt is what the tests ran with, without torch and what that brings; the command
# that renews it stands in its first lines (uv: pip install uv).
#
# Which torch: one >= 2.9 that sees a GPU (Colab, RunPod) is built on; else .venv gets its own, made
# for the driver of the GPU that is there. A torch that is in PYTHON already stays if it can.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"
MARK="$VENV/.installed" # MARK-EXTRA holds the hash of what was installed
CONSTRAINTS="$ROOT/speedrun/constraints.txt"
NO_TORCH="it has no torch"
BASE=""        # the Python to make .venv of
KEEPS_TORCH="" # not empty if that Python's torch drives a GPU

# Names of others reach the terminal here: control characters in them are shown as question marks.
say() { printf 'qat: %s\n' "$*" | LC_ALL=C tr '\001-\010\013-\037\177' '?' >&2; }

has_version() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Why a Python's torch cannot be built on, as a few words; nothing if it can.
torch_obstacle() {
    "$1" - 2>/dev/null <<'PY' || echo "$NO_TORCH"
import re, sys
import torch
version = torch.__version__
if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < (2, 9):
    print(f"its torch {version} is older than 2.9, which qat needs")
elif sys.version_info < (3, 11):
    print(f"its torch {version} is of a Python older than 3.11, which qat needs")
elif not torch.cuda.is_available():
    print(f"its torch {version} sees no GPU")
PY
}

# The Python to build on: one whose torch drives a GPU, else the newest that is there.
find_base() {
    local obstacle others=""
    for BASE in python3 python; do
        obstacle="$(torch_obstacle "$BASE")"
        if [ -z "$obstacle" ]; then
            KEEPS_TORCH=yes
            return
        fi
        if [ "$obstacle" != "$NO_TORCH" ]; then others="$BASE: $obstacle"; fi
    done
    if [ -n "$others" ]; then say "not built on $others; .venv gets a torch of its own"; fi
    for BASE in python3.13 python3.12 python3.11 python3 python; do
        if has_version "$BASE"; then return; fi
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
    local options=()
    find_base || return 1
    if [ -n "$KEEPS_TORCH" ]; then options+=(--system-site-packages); fi
    if ! "$BASE" -c 'import ensurepip' 2>/dev/null; then
        if [ -z "$KEEPS_TORCH" ]; then
            say "$BASE has no ensurepip; install its venv package (Debian: apt install python3-venv)"
            return 1
        fi
        options+=(--without-pip) # the base's own pip is seen through its packages
    fi
    "$BASE" -m venv --clear ${options[@]+"${options[@]}"} "$VENV" || return 1
    if [ -n "$KEEPS_TORCH" ]; then share_packages "$BASE"; fi
}

# Installs into the python3 on PATH from now on: Colab's, whose notebooks run `!qat` there.
use_running_python() {
    PYTHON="$(command -v python3)" && has_version "$PYTHON" || return 1
    MARK="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/qat-installed"
}

# Python: `installed` is the version of its torch, or empty if that is not >= 2.9.
READ_TORCH='
import importlib.metadata as metadata, re
try:
    installed = metadata.version("torch")
except metadata.PackageNotFoundError:
    installed = "0"
if tuple(int(part) for part in re.findall(r"\d+", installed)[:2]) < (2, 9):
    installed = ""
'

installed_torch() { "$PYTHON" -c "$READ_TORCH"$'\nprint(installed)'; }

# Where this machine has an NVIDIA GPU and PYTHON no torch that drives it: the build of torch that
# runs with its driver. On other machines pip finds one by itself.
bring_torch() {
    local told index limit obstacle wanted=(torch -c "$CONSTRAINTS")
    told="$("$PYTHON" "$ROOT/qat/backend/nvidia.py" 2>&1)" || say "$told"
    case "$told" in https://*) ;; *) return ;; esac
    obstacle="$(torch_obstacle "$PYTHON")"
    if [ -z "$obstacle" ]; then return; fi
    read -r index limit <<<"$told"
    if [ -n "$limit" ]; then wanted=("$limit"); fi
    say "a GPU is here: fetching the torch that its driver runs (${index##*/}, some GB), as $PYTHON" \
        "does not do: $obstacle"
    pip_install --retries 2 --force-reinstall --index-url "$index" "${wanted[@]}" ||
        say "not fetched, as said above; going on with the torch that pip finds by itself"
}

# pip with its own progress bars on a terminal; elsewhere (a log, CI) it prints errors alone.
pip_install() {
    local quiet=(-qq)
    if [ -t 2 ]; then quiet=(); fi
    "$PYTHON" -m pip install ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check --no-input "$@" >&2
}

# What an installation of EXTRA takes, in words: sizes are of a CPU's torch, which is half of them.
expected_cost() {
    local size="1.4 GB" minutes="a few"
    if [ "$1" = dev ]; then size="3.1 GB" minutes="5 to 10"; fi
    if [ -n "$2" ]; then
        echo "less than $size, as torch is there, some minutes"
    else
        echo "about $size on disk, some GB more where torch brings CUDA, $minutes minutes"
    fi
}

# What an installation depends on, as one number; torch, as a pod's next image may bring another.
installation_hash() {
    "$PYTHON" -c "$READ_TORCH"'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
files = [root / "pyproject.toml", root / "speedrun" / "constraints.txt"]
parts = [str(root), sys.version, sys.argv[2], installed, *(file.read_text() for file in files)]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
' "$ROOT" "$1"
}

is_installed() { [ "$(cat "$MARK-$1" 2>/dev/null)" = "$(installation_hash "$1")" ]; }

install_package() {
    local target="$ROOT" pins=(-c "$CONSTRAINTS") torch began=$SECONDS
    if [ "$1" != base ]; then target="$ROOT[$1]"; fi
    say "installing for $PYTHON: $(expected_cost "$1" "$(installed_torch)"), once"
    "$PYTHON" -c 'import pip' 2>/dev/null || "$PYTHON" -m ensurepip >&2 || return 1 # made by uv
    bring_torch
    torch="$(installed_torch)"
    if [ -n "$torch" ] && ! grep -qx "torch==${torch%%+*}" "$CONSTRAINTS"; then
        pins=("torch==$torch") # another than we would choose: it stays as it is
    fi
    if [ -n "$2" ]; then
        pip_install --require-hashes --no-deps -r "$2" || return 1
    fi
    pip_install "${pins[@]}" -e "$target" || return 1
    say "installed in $((SECONDS - began)) s"
    installation_hash "$1" >"$MARK-$1"
}

# setup_env EXTRA [LOCK]: `base` for users, `dev` (which holds `base`) for the tests.
setup_env() {
    if ! has_version "$PYTHON"; then make_venv || return 1; fi
    if is_installed "$1" || is_installed dev; then return; fi
    install_package "$1" "${2-}"
}
