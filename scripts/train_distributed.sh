#!/usr/bin/env bash
# Runs fairseq-train with several workers (processes that share every batch), on whatever there is.
#
#   bash scripts/train_distributed.sh [--workers N] [--reference-workers M] -- FAIRSEQ-TRAIN-ARGUMENTS
#
# One node:   bash scripts/train_distributed.sh -- ...               one worker per GPU, or on N of them
# torchrun:   torchrun --no-python --nproc-per-node 8 bash scripts/train_distributed.sh -- ...
# Slurm:      srun bash scripts/train_distributed.sh -- ...          one task per node, or one per GPU
# CPU:        bash scripts/train_distributed.sh --workers 2 -- ...   without a GPU, or with --cpu (gloo)
#
# --workers N            how many; default: every GPU, or 1 on CPU. torchrun and Slurm say it themselves
# --reference-workers M  keep the batch of M workers: adds --update-freq M/N
#
# When a worker fails, the others end; when this script is killed, its workers are.
set -euo pipefail

usage() {
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
}

refuse() {
    echo "train_distributed.sh: $1" >&2
    exit 2
}

workers= reference=
while [[ $# -gt 0 && $1 != -- ]]; do
    case $1 in
        -h | --help) usage && exit ;;
        --workers | --reference-workers)
            [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || refuse "$1 is '${2:-}'; use a number, 1 or more"
            if [[ $1 == --workers ]]; then workers=$2; else reference=$2; fi
            shift 2
            ;;
        *) refuse "$1 is not an option of this script; put fairseq-train's arguments after --" ;;
    esac
done
[[ ${1:-} == -- && $# -gt 1 ]] || refuse "nothing to train; put fairseq-train's arguments after --"
shift
command -v fairseq-train >/dev/null ||
    refuse "fairseq-train is not on the PATH; run bash scripts/install.sh and source .venv/bin/activate"

# has OPTION ARGUMENTS: whether it is among them.
has() {
    local argument
    for argument in "${@:2}"; do
        [[ $argument == "$1" || $argument == "$1="* ]] && return
    done
    return 1
}

# started NUMBER LAUNCHER: who decides how many workers there are.
started() {
    [[ -z $workers || $workers == "$1" ]] || refuse "--workers is $workers, but $2 started $1; leave it out"
    workers=$1
}

gpus=0
has --cpu "$@" || gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
launch=(fairseq-train "$@")
if [[ -n ${MASTER_ADDR:-} && -n ${MASTER_PORT:-} && -n ${WORLD_SIZE:-} && -n ${RANK:-} ]]; then
    # fairseq would take its default of one worker per visible GPU, here 1, and train WORLD_SIZE separate
    # models into one --save-dir.
    ((gpus > 0)) ||
        refuse "torchrun needs CUDA; on CPU leave it out and use this script's --workers $WORLD_SIZE"
    started "$WORLD_SIZE" torchrun
elif [[ -n ${SLURM_PROCID:-} && -n ${SLURM_JOB_NODELIST:-}${SLURM_STEP_NODELIST:-} ]]; then
    ((gpus > 0)) || refuse "Slurm gave no GPU; ask for some with srun --gpus-per-node=N, or leave srun out"
    tasks_per_node=${SLURM_NTASKS_PER_NODE:-$((${SLURM_NTASKS:-1} / ${SLURM_NNODES:-1}))}
    started "$((${SLURM_NNODES:-1} * (tasks_per_node == 1 ? gpus : tasks_per_node)))" Slurm
    # Without a port, fairseq forgets what it has learnt from Slurm and looks at one node alone.
    has --distributed-port "$@" || launch+=(--distributed-port "$((10000 + ${SLURM_JOB_ID:-0} % 50000))")
elif ((gpus > 0)); then
    workers=${workers:-$gpus}
    ((workers <= gpus)) || refuse "--workers is $workers, but there are $gpus GPUs; use $gpus or fewer"
else
    workers=${workers:-1}
    on_cpu=1
fi

if [[ -n $reference ]]; then
    has --update-freq "$@" && refuse "--reference-workers sets --update-freq; leave one of them out"
    ((reference % workers == 0)) ||
        refuse "--reference-workers is $reference, with $workers workers; use a multiple of $workers"
    launch+=(--update-freq "$((reference / workers))")
fi
launch+=(--distributed-world-size "$workers")
[[ -n ${on_cpu:-} ]] || exec "${launch[@]}"

# On CPU. pytorch_ddp, fairseq's default, passes the number of a GPU there.
has --cpu "$@" || launch+=(--cpu)
has --ddp-backend "$@" || launch+=(--ddp-backend legacy_ddp)
((workers > 1)) || exec "${launch[@]}"
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
launch+=(--distributed-backend gloo --distributed-init-method "tcp://127.0.0.1:$port" --distributed-no-spawn)

# Linux ends them even when this script has no time to.
guard=()
setpriv --pdeathsig KILL true 2>/dev/null && guard=(setpriv --pdeathsig KILL)

# Everything in the background belongs to this script, and ends with it.
trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
for ((rank = 0; rank < workers; rank++)); do
    # "${a[@]+...}": an empty array is an unset variable to older bash.
    ${guard[@]+"${guard[@]}"} "${launch[@]}" --distributed-rank "$rank" &
done
for ((rank = 0; rank < workers; rank++)); do
    wait -n || {
        status=$?
        echo "train_distributed.sh: a worker ended with status $status; ending the others" >&2
        exit "$status"
    }
done
