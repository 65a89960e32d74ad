#!/usr/bin/env bash
# Trains on WMT14 English to German, averages checkpoints, translates newstest2014 and scores it: the number to
# publish is sacrebleu's, of detokenised text, with its signature.
#
#   bash scripts/train_wmt14_en_de.sh [SIZE [OPTIONS]]
#
# SIZE     base: transformer_wmt_en_de, 32,768 tokens a batch, 100,000 updates (Vaswani et al. 2017; the default)
#          big:  transformer_vaswani_wmt_en_de_big, 458,752 tokens, 30,000 updates (Ott et al. 2018)
#          tiny: a test of this script on a CPU, about a minute
# OPTIONS  of fairseq-train; the last of repeated ones counts: --node-solver rk4, --path-penalty arclength, ...
#
# On all GPUs of this machine, in half precision; on none, on the CPU. The batch stays the same on any number of
# GPUs, by --update-freq. It may be stopped at any time and goes on, on another number of GPUs if need be.
# In DIR: train.log, the last checkpoints, average.pt, test.out, test.hyp, test.bleu. Environment variables:
#   MODEL=node|stock    continuous depth (bosh3, tolerance 0.1), or fairseq's transformer (default: node)
#   NORM=pre|post       where layer norms are: before, a smoother field of fewer steps; after, as in the papers
#                       (default: pre)
#   DATA=DIR            what scripts/prepare_wmt14.py made (default: data/wmt14_en_de)
#   DIR=DIR             folder for the run (default: checkpoints/wmt14_en_de_MODEL_SIZE)
#   GPUS=N              GPUs of this machine to use (default: all)
#   MAX_TOKENS=N        tokens that fit on one GPU at a time (default: 4096; big: 3584)
#   SEED=N              (default: 1)
#   UPDATES=N           other than SIZE's
#   AVERAGE=N           checkpoints to average, 1,000 updates apart (default: 5; big: 10)
#   GENERATE=...        options of fairseq-generate (default: --beam 4 --lenpen 0.6)
# Several machines with GPUS each, this same command on all of them (on Slurm: by srun, one task a machine):
#   NODES=N             how many (default: Slurm's, or 1)
#   NODE_RANK=N         which one this is, from 0 (default: Slurm's)
#   MASTER=HOST:PORT    a free port of the first one
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$scripts/lib/steps.sh"
user_dir=$scripts/../fairseq_node
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    usage
    exit
fi
size=${1:-base}
[[ $# -eq 0 ]] || shift
model=${MODEL:-node}
data=${DATA:-data/wmt14_en_de}
dir=${DIR:-checkpoints/wmt14_en_de_${model}_$size}
seed=${SEED:-1}
nodes=${NODES:-${SLURM_NNODES:-1}}
rank=${NODE_RANK:-${SLURM_NODEID:-0}}
need fairseq-train fairseq-generate sacrebleu
[[ -d $data/data-bin ]] || die "$data has no data-bin: make it by python scripts/prepare_wmt14.py --out $data."

interval=1000
case $size in
base)
    arch=transformer_wmt_en_de batch=32768 tokens=4096 updates=100000 average=5
    shape=(--dropout 0.1 --lr 7e-4 --warmup-updates 4000)
    ;;
big)
    arch=transformer_vaswani_wmt_en_de_big batch=458752 tokens=3584 updates=30000 average=10
    shape=(--dropout 0.3 --lr 1e-3 --warmup-updates 4000)
    ;;
tiny)
    arch=transformer_tiny batch=2000 tokens=1000 updates=30 average=2 interval=10
    shape=(--dropout 0 --lr 5e-3 --warmup-updates 10 --encoder-layers 1 --decoder-layers 1)
    ;;
*) die "SIZE is $size: use base, big or tiny, then the options of fairseq-train." ;;
esac
case $model in
stock) variant=(--arch "$arch" --criterion label_smoothed_cross_entropy) ;;
node)
    variant=(--arch "node_$arch" --criterion label_smoothed_cross_entropy_with_path)
    variant+=(--node-solver bosh3 --node-rtol 0.1 --node-atol 0.1)
    ;;
*) die "MODEL is $model: use node or stock." ;;
esac
case ${NORM:-pre} in
pre) variant+=(--encoder-normalize-before --decoder-normalize-before) ;;
post) ;;
*) die "NORM is $NORM: use pre or post." ;;
esac
updates=${UPDATES:-$updates} average=${AVERAGE:-$average} tokens=${MAX_TOKENS:-$tokens}

visible=$(python -c 'import torch; print(torch.cuda.device_count())')
gpus=${GPUS:-$visible}
[[ $gpus -le $visible ]] || die "GPUS is $gpus, but this machine has $visible: use at most that."
if [[ $gpus -lt $visible ]]; then # fairseq takes all that it sees
    export CUDA_VISIBLE_DEVICES
    CUDA_VISIBLE_DEVICES=$(tr , '\n' <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((visible - 1)))}" | head -n "$gpus" | paste -sd, -)
fi
workers=$((nodes * (gpus > 0 ? gpus : 1)))
# batch = tokens on a GPU x GPUs x updates in one: the last first, then the tokens that make it exact.
frequency=$(((batch + tokens * workers - 1) / (tokens * workers)))
tokens=$((batch / (frequency * workers)))
[[ $tokens -ge 250 ]] || die "$workers GPUs are too many for batches of $batch tokens: use fewer."
where=(--distributed-world-size "$workers" --max-tokens "$tokens" --update-freq "$frequency")
if [[ $gpus == 0 ]]; then
    [[ $nodes == 1 ]] || die "NODES is $nodes, but this machine has no GPU: use one machine for the CPU."
    where+=(--cpu --num-workers 0)
else
    where+=(--fp16)
fi
if [[ $nodes -gt 1 ]]; then
    [[ -n ${MASTER:-} ]] || die "NODES is $nodes: give MASTER=HOST:PORT, the first machine and a free port of it."
    where+=(--distributed-init-method "tcp://$MASTER" --distributed-rank $((rank * gpus)))
fi
options=(
    --task translation --share-all-embeddings --label-smoothing 0.1 --seed "$seed"
    --optimizer adam --adam-betas '(0.9, 0.98)' --lr-scheduler inverse_sqrt --warmup-init-lr 1e-7
    "${shape[@]}" "${variant[@]}" "$@"
)
[[ $rank != 0 ]] || same_options "$dir/options" "${options[@]}"

say "Training: $workers x $tokens tokens x $frequency = $((workers * tokens * frequency)) tokens a batch"
if [[ -e $dir/trained-$updates ]]; then
    echo "$dir is trained already."
else
    mkdir -p "$dir"
    logged "$dir/train$([[ $rank == 0 ]] || echo "-$rank").log" 'train_inner|valid on .valid|done training|[Ee]rror:' \
        fairseq-train "$data/data-bin" --user-dir "$user_dir" --save-dir "$dir" --max-update "$updates" \
        --save-interval-updates "$interval" --keep-interval-updates "$average" --keep-last-epochs "$average" \
        --log-format simple --log-interval $((interval / 10)) "${where[@]}" "${options[@]}"
    [[ $rank == 0 ]] || exit 0
    rm -f "$dir"/{average.pt,test.out,test.hyp,test.bleu} "$dir"/trained-*
    touch "$dir/trained-$updates"
fi
[[ $rank == 0 ]] || exit 0

say "Averaging the last $average checkpoints"
if [[ -e $dir/average.pt ]]; then
    echo "$dir/average.pt is there already."
else
    # What falls on the end of an epoch has the name of the epoch; a training too short for either, neither.
    shopt -s nullglob
    saved=("$dir"/checkpoint_*_*.pt "$dir"/checkpoint[0-9]*.pt)
    [[ ${#saved[@]} -gt 0 ]] || saved=("$dir/checkpoint_last.pt")
    mapfile -t newest < <(ls -t "${saved[@]}" | head -n "$average")
    python "$scripts/average_checkpoints.py" --inputs "${newest[@]}" --output "$dir/average.pt"
fi

say "Translating newstest2014"
device=()
[[ $gpus -gt 0 ]] || device=(--cpu)
translate "$data/data-bin" "$dir/average.pt" test "$dir/test" --max-tokens 4000 "${device[@]}" \
    ${GENERATE:---beam 4 --lenpen 0.6}
say "BLEU of detokenised text"
bleu "$data/corpus/heldout/test.de" "$dir/test"
