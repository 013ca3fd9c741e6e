#!/usr/bin/env bash
# Everything behind docs/quality.md: teachers, texts, four comparisons, figures.
#
#     bash speedrun/quality.sh MODELS TEXTS RECORD [teacher_88m|stories|minimind|tiny ...]
#     bash speedrun/quality.sh MODELS TEXTS RECORD mixture smollm2
#     bash speedrun/quality.sh MODELS TEXTS RECORD onpolicy_smollm2 onpolicy_minimind2
#
#     ONLY='q2a4|EdgeRazor|a8kv8' bash speedrun/quality.sh MODELS TEXTS RECORD stories ... smollm2
#     ONLY='2a2|codewords|EdgeRazor' bash speedrun/quality.sh MODELS TEXTS RECORD stories minimind ...
#
# MODELS holds stories15M and minimind2-small, and SmolLM2's .gguf; TEXTS is a folder of texts by
# source. teachers/teacher-88m and teachers/mixture come from speedrun/research/make_teacher.py of
# 27ec4204. Figures are appended to RECORD/figures.jsonl when all four were made. With ONLY the
# recipes of these words run, and no figure is made but those of quantized inputs. Run it from the
# root of the repository; it takes all GPUs that there are, and goes on where it was stopped.
set -uo pipefail
models=$(realpath "$1") texts=$(realpath "$2") record=$3
mkdir -p teachers texts runs "$record"
gpus=$(python -c "import torch; print(max(1, torch.cuda.device_count()))")
only=${ONLY:-} documents=${DOCUMENTS:-40000} workers=${WORKERS:-8}
stories=${TINYSTORIES:-$texts/tinystories-sample/tinystories_sample.txt}
instructions=${INSTRUCTIONS:-$texts/alpaca-demo/alpaca_en_demo.json}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # many jobs share the cores

on_gpus() { CUDA_VISIBLE_DEVICES=$1 "${@:2}"; }

compare() { # GPUS NAME
    on_gpus "$1" qat bench quality "speedrun/recipes/quality_$2.toml" --out "runs/$2" \
        --workers "$workers" --only "$only" > "runs/$2.log" 2>&1
}

sample() { # GPUS TEACHER FILE ROWS TOP_P SEED [MAX_TOKENS]
    [ -e "$3" ] && return
    on_gpus "$1" qat sample "teachers/$2" --out "$3" --rows "$4" --top-p "$5" --seed "$6" \
        --max-new-tokens "${7:-255}" --least-variety 0.25 --dtype fp32 --batch-size "$batch"
}

teacher_88m() { # GPUS
    compare "$1" teacher88m
}

stories() { # GPUS
    sample "$1" stories15M texts/stories15m_untruncated.jsonl 1000 1.0 1
    sample "$1" stories15M texts/stories15m.jsonl "$documents" 0.9 0
    compare "$1" stories15m
}

minimind() { # GPUS
    # rows of 256 hold them whole, with the tokens that begin and end them
    sample "$1" minimind2-small texts/minimind2.jsonl "$documents" 0.9 0 250
    compare "$1" minimind2
}

tiny() { # GPUS
    compare "$1" tiny_qwen3
    [ -z "$only" ] || return 0
    until [ -e texts/stories15m.jsonl ]; do sleep 1; done
    compare "$1" stories15m_more
}

mixture() { # GPUS
    compare "$1" mixture
    [ -n "$only" ] || python speedrun/quality_figures.py over-baselines runs/mixture --recipe q2a4 --figure moe_kl_ratio \
        --goal "<= 0.5" --figures "$record/figures.jsonl"
}

smollm2() { # GPUS
    mkdir -p teachers/smollm2
    ln -sf "$models"/SmolLM2-135M-Instruct.Q4_1.gguf teachers/smollm2/
    sample "$1" smollm2/SmolLM2-135M-Instruct.Q4_1.gguf texts/smollm2.jsonl "$((documents / 2))" 0.9 0 126
    compare "$1" smollm2
    [ -n "$only" ] || python speedrun/quality_figures.py over-baselines runs/smollm2 --kl smollm2_kl \
        --figure smollm2_over_best_baseline --goal "<= 0.4" --figures "$record/figures.jsonl"
}

questions() { # of GSM8K, Alpaca and Self-Instruct, as chats that nobody has answered
    [ -e texts/questions.jsonl ] && return
    python - "$texts" "$instructions" > texts/questions.jsonl.part << 'PYTHON'
import json, sys
from pathlib import Path

def rows(path):
    text = Path(path).read_text(encoding="utf-8")
    return json.loads(text) if path.endswith(".json") else map(json.loads, text.splitlines())

texts, instructions = sys.argv[1:]
for row in rows(f"{texts}/gsm8k/train.jsonl"):
    print(json.dumps({"messages": [{"role": "user", "content": row["question"]}]}))
for path in (instructions, *(f"{texts}/self-instruct/{name}.jsonl"
                             for name in ("seed_tasks", "user_oriented_instructions"))):
    for row in rows(path):
        given = row["input"] if "input" in row else row["instances"][0]["input"]
        asked = "\n\n".join(filter(None, (row["instruction"], given)))
        if len(asked) < 600:  # there is room for an answer in a row
            print(json.dumps({"messages": [{"role": "user", "content": asked}]}))
PYTHON
    mv texts/questions.jsonl.part texts/questions.jsonl
}

answers() { # GPUS TEACHER FILE
    [ -e "$3" ] || on_gpus "$1" qat sample "teachers/$2" --prompts texts/questions.jsonl \
        --samples 2 --max-new-tokens 160 --least-variety 0.25 --dtype fp32 --out "$3"
}

onpolicy_smollm2() { # GPUS
    mkdir -p teachers/smollm2
    ln -sf "$models"/SmolLM2-135M-Instruct.Q4_1.gguf teachers/smollm2/
    answers "$1" smollm2/SmolLM2-135M-Instruct.Q4_1.gguf texts/answers_smollm2.jsonl
    compare "$1" onpolicy_smollm2
}

onpolicy_minimind2() { # GPUS
    answers "$1" minimind2-small texts/answers_minimind2.jsonl
    compare "$1" onpolicy_minimind2
}

ln -sfn "$models/stories15M" teachers/stories15M
ln -sfn "$models/minimind2-small" teachers/minimind2-small
[ -e texts/tinystories.txt ] || cp "$stories" texts/tinystories.txt
[ -e texts/instructions.json ] || cp "$instructions" texts/instructions.json

shares() { # COUNT: the GPUs of each of so many comparisons
    python -c "
n, gpus = $1, $gpus
print(*(','.join(map(str, range(i, gpus, n))) or i % gpus for i in range(n)))"
}

wanted=("${@:4}")
case " ${wanted[*]} " in *onpolicy_*) questions ;; esac # once, before they begin side by side
[ ${#wanted[@]} -gt 0 ] || wanted=(teacher_88m stories minimind tiny)
read -ra gpus_of <<< "$(shares ${#wanted[@]})"
sharing=$(((${#wanted[@]} + gpus - 1) / gpus)) # comparisons on a GPU: they sample at the same time
batch=$((2048 / sharing))
jobs=()
for i in "${!wanted[@]}"; do
    "${wanted[$i]}" "${gpus_of[$i]}" & jobs+=($!)
done
failed=0
for job in "${jobs[@]}"; do wait "$job" || failed=1; done
if [ $# -le 3 ]; then
    python speedrun/quality_figures.py runs --figures "$record/figures.jsonl" || failed=1
    python speedrun/quality_figures.py equal-time runs/{stories15m,minimind2,tiny_qwen3,teacher88m} \
        --figures "$record/figures.jsonl" || failed=1
fi
with_inputs=()
for name in stories15m minimind2 tiny_qwen3 smollm2; do
    grep -Eqs '"[^"]*(_|, )a8' "runs/$name/results.jsonl" && with_inputs+=("runs/$name")
done
if [ ${#with_inputs[@]} -gt 0 ]; then
    python speedrun/quality_figures.py activations "${with_inputs[@]}" --figures "$record/figures.jsonl" || failed=1
fi
own=()
for name in "${wanted[@]}"; do [[ $name == onpolicy_* ]] && own+=("runs/$name"); done
if [ ${#own[@]} -gt 0 ] && [ -z "$only" ]; then
    python speedrun/quality_figures.py own-words "${own[@]}" --figures "$record/figures.jsonl" || failed=1
fi
exit $failed
