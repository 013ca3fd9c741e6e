#!/usr/bin/env bash
# Files of the reference system come in, a student travels, every target is shipped to; then what
# cannot be seen in one run: fuzzed readers, shells, notebooks.
#
#     bash speedrun/ecosystem.sh DATA RECORD
#
# DATA holds anemll-legacy (files that the reference system wrote) and stories15M (a float model).
# Figures go to RECORD/figures.jsonl, what is seen to RECORD/transcript.txt. Run it from the root of
# the repository with `qat` on PATH.
set -euo pipefail
mkdir -p "$2"
data=$1 record=$2
figures=$record/figures.jsonl
work=$(mktemp -d)
export TMPDIR=$work/tmp # so that no path of this machine is in what is kept
mkdir "$TMPDIR"
noise='/torchao.*_C_/d; /_pytree.py/d; s#^.*\r##' # of libraries
exec > >(sed -u "s#$work/##g; $noise" | tee "$record/transcript.txt") 2>&1
trap 'rm -rf "$work"' EXIT
drive=$work/drive registry=$work/hub.toml # a folder in a mounted Drive's place
mkdir -p "$drive/qat"

title() { printf '\n== %s\n' "$*"; }
show() { printf '\n$ %s\n' "$*"; "$@"; }

title "A user of the reference moves over: checkpoint, cache, training, and back"
legacy=$data/anemll-legacy
PYTHONPATH=speedrun python -c "import pathlib, sys, measure_legacy as m; \
m.with_tokenizer(*map(pathlib.Path, sys.argv[1:]))" "$legacy/base" "$work/base"
show qat convert "$legacy/v2_q2a4_r32" --from anemll --base "$work/base" --out "$work/imported"
show qat cache import "$legacy/cache_L32_K16_R8" --teacher "$work/base" --out "$work/legacy_cache"
show qat train "$work/imported" --cache-dir "$work/legacy_cache" --loss candidates --temperature 2 \
    --learn scales --batch-size 8 --max-steps 20 --device cpu --out "$work/legacy_run"
show qat export "$work/legacy_run" --to anemll --out "$work/back"
show python speedrun/measure_legacy.py "$legacy" --figures "$figures"

title "A student travels: pack, push, pull, train"
teacher=checkpoints/tiny-qwen3
show qat cache --teacher "$teacher" --data stdlib --num-sequences 500 --out "$work/my_cache"
show qat convert "$teacher" --to q2a4 --calibration "$work/my_cache" --calibration-sequences 64 \
    --out "$work/my_student"
for name in my_cache my_student; do
    show qat hub push "$work/$name" "$drive/qat" --drive "$drive" | tee "$work/pushed"
    add=$(tail -n 1 "$work/pushed" | python -c "import json, sys; print(json.load(sys.stdin)['add'])")
    show eval "$add --registry $registry"
    show qat hub pull "$name" --drive "$drive" --registry "$registry" --out "$work/pulled/$name"
done
show qat train "$work/pulled/my_student" --cache-dir "$work/pulled/my_cache" --batch-size 16 \
    --max-steps 20 --tensorboard --gdrive-dir "$drive" --device cpu --out "$work/runs/q2"
show find "$drive" -type f

title "Every target: convert for it, train, export, read back with its own library"
show python speedrun/measure_export.py "$data/stories15M" --figures "$figures"

title "Damaged and evil files, shells, notebooks"
show python tests/stress/fuzz_archives.py --cases 10000 --figures "$figures"
show python tests/stress/fuzz_legacy.py --cases 10000 --figures "$figures"
show python speedrun/measure_setup.py --figures "$figures"
show python speedrun/run_notebooks.py --figures "$figures"
