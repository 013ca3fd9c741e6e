#!/usr/bin/env bash
# Whether this machine's GPUs compute what the tests promise: bash speedrun/gpu_check.sh [--full]
#
# Prints the versions, then checks in turn: the kernels' gates, causality and parity of attention,
# steps of training, and two ranks where there are two GPUs. --full runs all GPU tests. Ends with 0
# if every check passed, else with 1.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

case "$*" in
"" | --full) ;;
*)
    say "'$*' is no argument of gpu_check.sh, expected --full or nothing; drop it"
    exit 1
    ;;
esac
# a driver of NVIDIA or AMD, or Windows' one below WSL: without any, nothing is installed
has_gpu() {
    nvidia-smi -L >/dev/null 2>&1 || compgen -G "/dev/nvidia[0-9]*" >/dev/null || [ -e /dev/kfd ] ||
        [ -e /dev/dxg ]
}
if [ ! -e "$MARK-dev" ] && ! has_gpu; then
    say "this machine has no GPU, expected one to check; bash speedrun/test.sh runs the other tests"
    exit 1
fi
setup_env dev
cd "$ROOT"
"$PYTHON" - <<'PY'
import subprocess, sys
from importlib import metadata
import torch
commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
count = torch.cuda.device_count()
if not count:
    sys.exit("qat: torch sees no GPU, expected one to check; see nvidia-smi and CUDA_VISIBLE_DEVICES")
from qat.backend import nvidia
driver = nvidia.present()
facts = {
    "qat": commit.stdout.strip() or "not a checkout",
    "python": sys.version.split()[0],
    "torch": torch.__version__,
    "CUDA": torch.version.cuda,
    "triton": next((each.version for each in metadata.distributions(name="triton")), None),
    "driver": driver and driver.driver,
    "GPUs": ", ".join(torch.cuda.get_device_name(each) for each in range(count)),
}
print(*(f"{name}: {value}" for name, value in facts.items()), sep="\n")
PY

FAILED=()
# check NAME PATHS...: no test at all is a failure too
check() {
    local name="$1"
    shift
    say "checking $name"
    "$PYTHON" -m pytest -m gpu -rs "$@" || FAILED+=("$name")
}

if [ "$*" = --full ]; then
    check "all GPU tests" tests/gpu
else
    check "kernels' gates" tests/gpu/test_bench_kernels_gpu.py tests/gpu/test_effective_gpu.py
    check "causality and parity" tests/gpu/test_nsa_gpu.py tests/gpu/test_nsa_swap_gpu.py \
        tests/gpu/test_joined_gpu.py
    check "training steps" tests/gpu/test_cuda.py tests/gpu/test_step_gpu.py
    check "two ranks" tests/gpu/test_ranks_gpu.py
fi
if [ "${#FAILED[@]}" -gt 0 ]; then
    say "failed: $(IFS=,; echo "${FAILED[*]}")"
    exit 1
fi
say "every check passed"
