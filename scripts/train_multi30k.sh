#!/usr/bin/env bash
# Trains a Transformer on Multi30k, stock or of continuous depth, translates both test sets and scores them.
#
#   bash scripts/train_multi30k.sh [NAME [OPTIONS]]
#
# NAME     what to train, and the folder for it under DIR (default: stock)
#            stock, stock-1, stock-6        fairseq's transformer of 3+3, 1+1 and 6+6 layers
#            euler, rk4                     node_transformer of 3+3 blocks, one step each; euler is stock
#            dopri5-TOL                     3+3 blocks, steps by sentence: dopri5-1e-1, dopri5-1e-2, dopri5-1e-3
#            tied-SOLVER, tied-SOLVER-TOL   1+1 blocks, weights tied over depth: tied-rk4, tied-bosh3-1e-1
#            arclength-WEIGHT               1+1 blocks of bosh3 at 1e-1 whose arclength is penalised
#          any other name is stock, plus OPTIONS
# OPTIONS  of fairseq-train; the last of repeated ones counts
#
# Pre-norm, d = 128, feed-forward 512, 4 heads, joint pieces, shared embeddings, dropout 0.2, label smoothing
# 0.1, Adam at 3e-3 after 600 updates of warm-up, 2,500 tokens a batch, 14 epochs = 3,066 updates, one seed.
# stock takes half an hour on one core. It may be stopped at any time; a second call goes on from the last epoch.
# In DIR/NAME: train.log, checkpoint_best.pt (by validation nll), and for test and test1 the output of
# fairseq-generate (.out), the translations (.hyp), sacrebleu's score with its signature (.bleu).
# Compare runs by python scripts/compare_runs.py DIR. Environment variables:
#   DATA=DIR       what scripts/prepare_multi30k.sh made (default: data/multi30k)
#   DIR=DIR        folder for the runs (default: checkpoints/multi30k)
#   SEED=N         (default: 1)
#   EPOCHS=N       (default: 14)
#   GENERATE=...   options of fairseq-generate (default: --beam 5)
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$scripts/lib/steps.sh"
user_dir=$scripts/../fairseq_node
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    usage
    exit
fi
name=${1:-stock}
[[ $# -eq 0 ]] || shift
[[ $name != -* && $name != */* ]] || die "$name is no name of a run: put it before the options of fairseq-train."
data=${DATA:-data/multi30k}
dir=${DIR:-checkpoints/multi30k}/$name
epochs=${EPOCHS:-14}
seed=${SEED:-1}
need fairseq-train fairseq-generate sacrebleu
[[ -d $data/data-bin ]] || die "$data has no data-bin: make it by bash scripts/prepare_multi30k.sh $data."

# model LAYERS, and node LAYERS SOLVER [TOLERANCE]: options of the architecture.
model() {
    variant=(--arch transformer --criterion label_smoothed_cross_entropy --encoder-layers "$1" --decoder-layers "$1")
}
node() {
    variant=(
        --arch node_transformer --criterion label_smoothed_cross_entropy_with_path
        --encoder-layers "$1" --decoder-layers "$1" --node-solver "$2"
    )
    [[ -z ${3:-} ]] || variant+=(--node-rtol "$3" --node-atol "$3")
}

case $name in
stock-[0-9]*) model "${name#stock-}" ;;
euler | rk4) node 3 "$name" ;;
dopri5-*) node 3 dopri5 "${name#dopri5-}" ;;
tied-*-*) node 1 "$(cut -d- -f2 <<<"$name")" "$(cut -d- -f3- <<<"$name")" ;;
tied-*) node 1 "${name#tied-}" ;;
arclength-*)
    node 1 bosh3 0.1
    variant+=(--path-penalty arclength --path-weight "${name#arclength-}")
    ;;
*) model 3 ;;
esac
options=(
    --task translation --encoder-normalize-before --decoder-normalize-before --share-all-embeddings
    --encoder-embed-dim 128 --encoder-ffn-embed-dim 512 --encoder-attention-heads 4
    --decoder-embed-dim 128 --decoder-ffn-embed-dim 512 --decoder-attention-heads 4
    --dropout 0.2 --label-smoothing 0.1 --optimizer adam --adam-betas '(0.9, 0.98)' --lr 3e-3
    --lr-scheduler inverse_sqrt --warmup-updates 600 --max-tokens 2500 --seed "$seed" "${variant[@]}" "$@"
)
same_options "$dir/options" "${options[@]}"

say "Training $name"
if [[ -e $dir/trained-$epochs ]]; then
    echo "$dir is trained already."
else
    logged "$dir/train.log" 'train_inner|valid on|done training|Error|error:' \
        fairseq-train "$data/data-bin" --user-dir "$user_dir" --num-workers 0 --max-epoch "$epochs" \
        --best-checkpoint-metric nll_loss --no-epoch-checkpoints --save-dir "$dir" \
        --log-format simple --log-interval 25 "${options[@]}"
    rm -f "$dir"/test*.{out,hyp,bleu} "$dir"/trained-*
    touch "$dir/trained-$epochs"
fi

for subset in test test1; do
    say "Translating $subset with $name"
    translate "$data/data-bin" "$dir/checkpoint_best.pt" "$subset" "$dir/$subset" \
        --max-tokens 5000 ${GENERATE:---beam 5}
    bleu "$data/corpus/$subset.de" "$dir/$subset"
done
