# From a clone to a machine that can train:
#
#   source speedrun/setup.sh [CACHE] [CHECKPOINT] [--force]
#
# installs what is missing, fetches the named cache and checkpoint once (`qat hub list` has the
# names; a directory does as well) and exports CACHE_DIR and CHECKPOINT. For bash and zsh; anything
# else can run `bash speedrun/setup.sh ...`, which prints the exports.
#
# The work is done by setup_machine.sh in a process of its own: nothing of it stays in this shell,
# and when it fails this shell goes on, with a status that is not 0.

if [ -n "${BASH_VERSION:-}" ] && [ "${BASH_SOURCE:-}" != "$0" ]; then
    eval "$(command bash "$(dirname -- "$BASH_SOURCE")/setup_machine.sh" --sourced ${1+"$@"} || echo false)"
elif [ -n "${ZSH_VERSION:-}" ] && [ "${ZSH_EVAL_CONTEXT%file}" != "${ZSH_EVAL_CONTEXT:-}" ]; then
    eval "$(command bash "$(dirname -- "${(%):-%x}")/setup_machine.sh" --sourced ${1+"$@"} || echo false)"
elif [ "$(basename -- "$0")" = setup.sh ]; then
    command bash "$(dirname -- "$0")/setup_machine.sh" ${1+"$@"}
else
    echo "qat: this shell cannot source setup.sh; run: bash speedrun/setup.sh" >&2
    false
fi
