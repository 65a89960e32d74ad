#!/usr/bin/env bash
# fairseq-train on several workers, with the batch of one.
#
#   bash scripts/train_distributed.sh [--workers N] -- ARGUMENTS OF fairseq-train
#
# One node: run it as it is. It uses all visible GPUs, or with --workers N so many of them; without
# GPUs it starts N workers on the CPU, joined by gloo (for tests; the workers' logs come together).
#
# torchrun:  torchrun --nproc-per-node 8 [--nnodes ...] --no-python bash scripts/train_distributed.sh -- ...
# Slurm:     srun --ntasks-per-node 8 --gpus-per-node 8 bash scripts/train_distributed.sh -- ...
#            One task per GPU, or per node; every task sees all GPUs of its node. fairseq asks Slurm for the first
#            node's name; --distributed-port defaults to one that follows from the job's number.
# Under either the number of workers is theirs; --workers is not for them.
#
# The batch: --update-freq U is what one worker alone would use. It is divided by the number of workers,
# so that the same arguments give the same batch, the same schedule and the same meaning of --path-weight on
# 1, 2 or 8 GPUs. It must be divisible; where it is not, the message says what to use.
# --keep-update-freq leaves it as it is: the batch then grows with the number of workers.
set -euo pipefail

help() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; }
fail() {
    echo "train_distributed.sh: $*" >&2
    exit 2
}

workers='' keep=''
while [[ $# -gt 0 ]]; do
    case $1 in
    -h | --help)
        help
        exit
        ;;
    --workers)
        workers=${2:-}
        [[ $workers =~ ^[1-9][0-9]*$ ]] || fail "--workers is '$workers'; use a number such as 2"
        shift 2
        ;;
    --keep-update-freq)
        keep=yes
        shift
        ;;
    --)
        shift
        break
        ;;
    *) fail "unknown option $1; the arguments of fairseq-train come after --" ;;
    esac
done
[[ $# -gt 0 ]] || fail "the arguments of fairseq-train are missing; put them after --"

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
for argument in "$@"; do [[ $argument == --cpu ]] && gpus=0; done

launcher=''
if [[ -n ${WORLD_SIZE:-} && -n ${RANK:-} && -n ${MASTER_ADDR:-} ]]; then
    launcher=torchrun processes=$WORLD_SIZE
elif [[ ${SLURM_STEP_NUM_TASKS:-1} -gt 1 ]]; then
    launcher=srun processes=$SLURM_STEP_NUM_TASKS
fi
if [[ -n $launcher ]]; then
    [[ $gpus -gt 0 ]] || fail "$launcher started $processes workers, but there is no GPU, and fairseq would" \
        "train $processes separate models; run this script without $launcher and with --workers $processes"
    [[ -z $workers ]] || fail "--workers $workers is $launcher's to say; leave it out"
    workers=$processes
    # With one task per node fairseq spawns a worker per GPU from each.
    if [[ $launcher == srun && $processes -eq ${SLURM_NNODES:-0} ]]; then workers=$((processes * gpus)); fi
fi
workers=${workers:-$((gpus > 0 ? gpus : 1))}
if [[ -z $launcher && $gpus -gt 0 && $workers -gt $gpus ]]; then
    fail "--workers is $workers, but there are $gpus GPUs; use --workers $gpus, or --cpu"
fi

# The last of repeated options wins, so that ours go behind the caller's.
arguments=("$@")
if [[ -z $keep && $workers -gt 1 ]]; then
    frequency=1
    while [[ $# -gt 0 ]]; do
        case $1 in
        --update-freq) frequency=${2:-} ;;
        --update-freq=*) frequency=${1#*=} ;;
        esac
        shift
    done
    divided=()
    for one in ${frequency//,/ }; do
        [[ $one =~ ^[1-9][0-9]*$ ]] || fail "--update-freq is '$frequency'; use numbers such as $workers"
        ((one % workers == 0)) || fail "--update-freq $one cannot be shared by $workers workers; use" \
            "--update-freq $(((one + workers - 1) / workers * workers)) with a --max-tokens so many times smaller," \
            "or --keep-update-freq for a larger batch"
        divided+=($((one / workers)))
    done
    arguments+=(--update-freq "$(IFS=,; echo "${divided[*]}")")
fi

if [[ $gpus -gt 0 ]]; then
    arguments+=(--distributed-world-size "$workers")
    if [[ $launcher == srun ]]; then
        arguments+=(--distributed-port $((10000 + ${SLURM_JOB_ID:-0} % 50000)))
    fi
    exec fairseq-train "${arguments[@]}"
fi
[[ $workers -gt 1 ]] || exec fairseq-train "${arguments[@]}" --cpu

port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
arguments+=(--cpu --distributed-backend gloo --ddp-backend legacy_ddp --distributed-no-spawn
    --distributed-init-method "tcp://127.0.0.1:$port" --distributed-world-size "$workers")
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
for ((rank = 0; rank < workers; rank++)); do
    fairseq-train "${arguments[@]}" --distributed-rank "$rank" &
    pids+=($!)
done
# A worker that fails takes the others, which wait for it, with it.
for ((finished = 0; finished < workers; finished++)); do wait -n; done
trap - EXIT
