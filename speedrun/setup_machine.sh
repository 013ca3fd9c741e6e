# Run by setup.sh: prepares this machine and prints, on standard output alone, the shell code that
# sets CACHE_DIR, CHECKPOINT and PATH. Everything a person reads goes to standard error.

set +e -uo pipefail # an exported SHELLOPTS may have switched -e on
unset CDPATH
HOME="${HOME:-/}"
exec 3>&1 1>&2 </dev/null
source "$(dirname -- "${BASH_SOURCE[0]}")/setup_env.sh"

USAGE="source speedrun/setup.sh [CACHE] [CHECKPOINT] [--force]; names: qat hub list"
PREFIX="${QAT_SETUP_PREFIX:-}" # the tests' own /content and /workspace
DRIVE=""                       # what `drive:` mirrors are relative to
FOUND=""                       # the directory that is being resolved
HOW=""                         # and how it came there
SOURCED=no
FORCE=no
CACHE_DIR="" # what to export; not what the caller's shell has
CHECKPOINT=""

fail() {
    say "$*"
    exit 1
}

quoted() { printf "'%s'" "$(printf '%s' "$1" | sed "s/'/'\\\\''/g")"; } # for any shell

# --- the machine ---------------------------------------------------------------------------------

is_colab() { [ -n "${COLAB_RELEASE_TAG:-}${COLAB_GPU:-}" ] && [ -d "$PREFIX/content" ]; }

is_runpod() { [ -n "${RUNPOD_POD_ID:-}" ] || [ -e "$PREFIX/etc/rp_environment" ]; }

mac_drive() { # the first account's folder
    local folder
    for folder in "$HOME"/Library/CloudStorage/GoogleDrive-*; do
        if [ -d "$folder/My Drive" ]; then folder="$folder/My Drive"; fi
        if [ -d "$folder" ]; then
            echo "$folder"
            return
        fi
    done
    return 1
}

# Where files may already lie. GDRIVE_PATH was set by a person, so it wins over what is found.
find_drive() {
    if [ -n "${GDRIVE_PATH:-}" ]; then
        if [ ! -d "$GDRIVE_PATH" ]; then
            fail "GDRIVE_PATH=$GDRIVE_PATH is not a directory; mount the Drive or unset GDRIVE_PATH"
        fi
        DRIVE="$(cd -- "$GDRIVE_PATH" && pwd)"
    elif is_colab && [ -d "$PREFIX/content/drive/MyDrive" ]; then
        DRIVE="$PREFIX/content/drive/MyDrive"
    elif DRIVE="$(mac_drive)"; then
        :
    elif [ -n "$(ls -A "$HOME/gdrive" 2>/dev/null)" ]; then
        DRIVE="$HOME/gdrive"
    elif [ -n "${GCS_BUCKET:-}" ]; then
        DRIVE="gs://${GCS_BUCKET#gs://}"
    elif is_runpod && [ -d "$PREFIX/workspace" ]; then
        DRIVE="$PREFIX/workspace"
    fi
}

describe_machine() {
    local machine="plain machine"
    if is_colab; then
        machine="Colab"
    elif is_runpod; then
        machine="RunPod"
    elif [ -d "$HOME/Library/CloudStorage" ]; then
        machine="macOS"
    fi
    say "$machine, ${DRIVE:-no Drive}"
    if [ "$machine" = Colab ] && [ -z "$DRIVE" ]; then
        say "Drive is not mounted: Files (left) > Mount Drive, then run this again; going on without"
    fi
    if [ -z "$DRIVE" ] && [ -d "$HOME/gdrive" ]; then
        say "$HOME/gdrive is empty: mount it with rclone, then run this again; going on without"
    fi
    if [ "$machine" = RunPod ] && [ "${ROOT#"$PREFIX/workspace"}" = "$ROOT" ]; then
        say "this clone is outside /workspace: what is made in it ends with the pod"
    fi
}

# --- the environment -----------------------------------------------------------------------------

# A `qat` of this clone that is on PATH already, in an environment that the user made.
is_own_qat() {
    local command python origin
    command="$(command -v qat)" || return 1
    python="$(dirname "$command")/python"
    [ "$command" != "$VENV/bin/qat" ] && [ -x "$python" ] || return 1
    origin="$("$python" -P -c 'import importlib.util as u; print(u.find_spec("qat").origin)' \
        2>/dev/null)" || return 1
    [ "$origin" -ef "$ROOT/qat/__init__.py" ] && PYTHON="$python" && QAT="$command"
}

prepare_environment() {
    local extra=base
    case "$DRIVE" in gs://*) extra=remote ;; esac # what reads a bucket
    if is_colab; then
        use_running_python && setup_env "$extra" || say_not_installed
        QAT="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/qat"
    elif ! is_own_qat; then
        setup_env "$extra" || say_not_installed
        QAT="$VENV/bin/qat"
    fi
}

# A GPU that is there and not used costs hours that nobody notices.
say_idle_gpu() {
    local line
    line="$("$PYTHON" "$ROOT/qat/backend/nvidia.py" idle)"
    if [ -n "$line" ]; then say "$line"; fi
}

say_not_installed() {
    fail "installing failed, as said above; without a network: 'pip download -d wheels $ROOT' on a" \
        "machine that has one, then '$PYTHON -m pip install --no-index --find-links wheels -e" \
        "$ROOT' here"
}

# --- caches and checkpoints ----------------------------------------------------------------------

# resolve NAME_OR_DIRECTORY: exports CACHE_DIR or CHECKPOINT, whichever it is.
resolve() {
    HOW="was there"
    case "$1" in
    */*)
        [ -d "$1" ] || fail "$1 is not a directory; expected one, or a name of qat hub list"
        FOUND="$(cd -- "$1" && pwd)"
        ;;
    *) find_here "$1" || import_left "$1" || fetch "$1" ;;
    esac
    case "$(kind_of "$FOUND")" in
    cache) keep CACHE_DIR "$CACHE_DIR" && CACHE_DIR="$FOUND" ;;
    checkpoint) keep CHECKPOINT "$CHECKPOINT" && CHECKPOINT="$FOUND" ;;
    *)
        fail "$FOUND holds no manifest.json, *.safetensors or run.json; expected a cache, a" \
            "checkpoint or a run"
        ;;
    esac
}

kind_of() {
    if [ -e "$1/manifest.json" ]; then
        echo cache
    elif [ -e "$1/run.json" ] || (cd -- "$1" && compgen -G '*.safetensors') >/dev/null 2>&1; then
        echo checkpoint
    fi
}

keep() { # VARIABLE, what it is already
    if [ -n "$2" ]; then fail "$2 and $FOUND are of one kind; expected one cache and one checkpoint"; fi
    say "$1=$FOUND ($HOW)"
}

find_here() {
    local folder
    if [ "$FORCE" = yes ]; then return 1; fi
    for folder in caches checkpoints; do
        FOUND="$ROOT/$folder/$1"
        if [ -n "$(kind_of "$FOUND")" ]; then return; fi
    done
    return 1
}

# Files of the reference's format that an earlier call fetched but did not get to import.
import_left() {
    if [ "$FORCE" = yes ]; then return 1; fi
    if [ -e "$ROOT/caches/$1.anemll" ]; then
        FOUND="$ROOT/caches/$1"
        import_reference cache
    elif [ -e "$ROOT/checkpoints/$1.anemll" ]; then
        FOUND="$ROOT/checkpoints/$1"
        import_reference checkpoint
    else
        return 1
    fi
}

fetch() {
    local options=() result kind format
    if [ -n "$DRIVE" ]; then options+=(--drive "$DRIVE"); fi
    if [ "$FORCE" = yes ]; then options+=(--force); fi
    result="$(cd "$ROOT" && "$QAT" hub pull "$1" ${options[@]+"${options[@]}"})" || exit 1
    result="$(printf '%s\n' "$result" | last_json)"
    { read -r kind && read -r format && read -r FOUND; } <<<"$result"
    HOW="fetched"
    if [ "$format" = anemll ]; then
        rm -rf "$FOUND.anemll"
        mv "$FOUND" "$FOUND.anemll"
        import_reference "$kind"
    fi
}

last_json() {
    "$PYTHON" -c '
import json, pathlib, sys
found = json.loads(sys.stdin.read().splitlines()[-1])
path = pathlib.Path(sys.argv[1], found["path"]).absolute()
print(found["kind"], found["format"], path, sep="\n")' "$ROOT"
}

# From FOUND.anemll, files of the reference's format, to FOUND.
import_reference() {
    local verb=(convert "$FOUND.anemll" --from anemll --out "$FOUND")
    if [ "$1" = cache ]; then verb=(cache import "$FOUND.anemll" --out "$FOUND"); fi
    say "importing $FOUND.anemll"
    (cd "$ROOT" && "$QAT" "${verb[@]}" >/dev/null) ||
        fail "not imported, as said above; that was: qat$(printf " '%s'" "${verb[@]}")"
    HOW="imported; $FOUND.anemll may be deleted"
}

# --- what comes next -----------------------------------------------------------------------------

# The float model that CHECKPOINT was made from, as its conversion or import wrote it down.
quoted_base() {
    local base
    base="$("$PYTHON" -c '
import json, pathlib, sys
for name, key in (("import_report.json", "base"), ("convert_report.json", "source")):
    report = pathlib.Path(sys.argv[1], name)
    if report.is_file():
        base = json.loads(report.read_text())[key]
        if isinstance(base, str) and base.isprintable():  # whoever made it may have written this
            print(base)' "$CHECKPOINT" 2>/dev/null)"
    quoted "${base:-FLOAT_MODEL}"
}

next_step() {
    local config="$CHECKPOINT/config.json" cache='"$CACHE_DIR"' loss=""
    # caches of the reference have no tail, which the usual loss needs
    if grep -qs '"has_tail": false' "$CACHE_DIR/manifest.json"; then loss=" --loss candidates"; fi
    if [ -z "$CHECKPOINT" ] && [ -z "$CACHE_DIR" ]; then
        echo "qat demo"
    elif [ -z "$CHECKPOINT" ]; then
        echo "source speedrun/setup.sh $(basename "$CACHE_DIR") CHECKPOINT"
    elif [ -z "$CACHE_DIR" ]; then
        echo 'qat generate "$CHECKPOINT" --prompt "What is 2+2?"'
    elif [ ! -e "$config" ]; then
        echo "qat eval \"\$CHECKPOINT\" --cache-dir $cache" # it is a run
    elif ! grep -q quantization_config "$config"; then
        echo "qat convert \"\$CHECKPOINT\" --to q4a4 --calibration $cache --out checkpoints/q4"
    elif ! grep -q '"bits": 2' "$config"; then
        echo "qat convert \"\$CHECKPOINT\" --to q2a4 --base $(quoted_base) --calibration $cache" \
            "--for mlx,gguf --out checkpoints/q2_init"
    else
        echo "qat train \"\$CHECKPOINT\" --cache-dir $cache --mlp-only$loss --out runs/q2"
    fi
}

# The shell code that the caller is to run.
exports() {
    case ":$PATH:" in
    *":$(dirname "$QAT"):"*) ;;
    *) printf 'export PATH=%s:"$PATH"\n' "$(quoted "$(dirname "$QAT")")" ;;
    esac
    if [ -n "$CACHE_DIR" ]; then echo "export CACHE_DIR=$(quoted "$CACHE_DIR")"; fi
    if [ -n "$CHECKPOINT" ]; then echo "export CHECKPOINT=$(quoted "$CHECKPOINT")"; fi
}

say_next() {
    if [ "$SOURCED" = yes ] || [ -z "$(exports)" ]; then
        say "next: $(next_step)"
    else
        say "the lines below set nothing in the shell that ran this; for that: source speedrun/setup.sh"
    fi
}

# --- all of it -----------------------------------------------------------------------------------

main() {
    local word names=()
    for word in "$@"; do
        case "$word" in
        --sourced) SOURCED=yes ;;
        --force) FORCE=yes ;;
        -h | --help) fail "$USAGE" ;;
        -* | "") fail "'$word' is not a flag of setup.sh; expected: $USAGE" ;;
        *) names+=("$word") ;;
        esac
    done
    if [ ${#names[@]} -gt 2 ]; then fail "found ${#names[@]} names; expected: $USAGE"; fi
    find_drive
    describe_machine
    prepare_environment
    say_idle_gpu
    for word in ${names[@]+"${names[@]}"}; do resolve "$word"; done
    say_next
    exports >&3
}

main "$@"
