#!/usr/bin/env bash
# Installs, trains stock fairseq's Transformer and an N-ODE Transformer of the same size to translate
# numbers, dates, times and prices, and compares them on held-out phrases.
#
#   bash scripts/demo.sh [DIR]
#
# DIR  folder for everything that is made (default: demo in the checkout); the report is DIR/report.md
#
# Under ten minutes on two CPU cores, after installation. It may be stopped at any time: a second call goes on where the
# first one was, training from its last checkpoint. Environment variables:
#   FAIRSEQ_NODE_SKIP_INSTALL=1  use the python and fairseq on the PATH
#   OMP_NUM_THREADS=N            threads to use (default: 2)
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit
fi
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "${1:-$checkout/demo}"
out=$(cd "${1:-$checkout/demo}" && pwd)
cd "$checkout"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
# Threads that spin while they wait are five times slower, not faster, when other programs run.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

if [[ ${FAIRSEQ_NODE_SKIP_INSTALL:-0} != 1 ]]; then
    venv=$(bash scripts/install.sh data plots)
    source "$venv/bin/activate"
fi

# The same for both models, so that they have the same parameters and see the same batches.
updates=900
shape=(
    --encoder-layers 1 --decoder-layers 1 --encoder-normalize-before --decoder-normalize-before
    --encoder-embed-dim 96 --decoder-embed-dim 96 --encoder-attention-heads 4 --decoder-attention-heads 4
    --encoder-ffn-embed-dim 192 --decoder-ffn-embed-dim 192 --share-all-embeddings --dropout 0
)
training=(
    --max-update "$updates" --max-tokens 1000 --seed 1 --label-smoothing 0.1
    --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1 --lr 5e-3
    --lr-scheduler polynomial_decay --warmup-updates 100 --total-num-update "$updates"
)
logging=(
    --log-format simple --log-interval 25
    # In updates, not in epochs.
    --validate-interval-updates 150 --validate-interval 1000
    --save-interval-updates 50 --save-interval 1000 --keep-interval-updates 1 --no-epoch-checkpoints
)

# say WHAT: a heading, with the time that has passed.
SECONDS=0
say() {
    printf '\n== %s (after %d:%02d)\n' "$1" $((SECONDS / 60)) $((SECONDS % 60))
}

# train NAME OPTIONS: into DIR/NAME, from its last checkpoint if there is one.
train() {
    local dir=$out/$1
    say "Training $1"
    if [[ -e $dir/trained ]]; then
        echo "$dir is trained already."
        return
    fi
    mkdir -p "$dir"
    fairseq-train "$out/data/data-bin" --user-dir fairseq_node --task translation --cpu --num-workers 0 \
        "${shape[@]}" "${training[@]}" "${logging[@]}" --save-dir "$dir" "${@:2}" 2>&1 |
        tee -a "$dir/train.log" | show 'train_inner|valid on|done training' || fail "$dir/train.log"
    touch "$dir/trained"
}

# translate NAME: the held-out phrases, into DIR/NAME/test.out, with messages in test.log.
translate() {
    local dir=$out/$1
    say "Translating with $1"
    if [[ -e $dir/test.out ]]; then
        echo "$dir/test.out is there already."
        return
    fi
    fairseq-generate "$out/data/data-bin" --user-dir fairseq_node --path "$dir/checkpoint_last.pt" --cpu \
        --gen-subset test --beam 4 --max-tokens 3000 --remove-bpe sentencepiece --scoring sacrebleu \
        --log-format simple --log-interval 1 2>&1 >"$dir/test.out.part" |
        tee "$dir/test.log" | show 'progress_bar|Translated' || fail "$dir/test.log"
    mv "$dir/test.out.part" "$dir/test.out"
}

# show PATTERN: the lines of fairseq's output that tell how far it is, without date and level.
show() {
    awk -v pattern="$1" '$0 ~ pattern { sub(/^.*INFO( \||:)/, ""); print; fflush() }'
}

fail() {
    tail -n 20 "$1" >&2
    echo "This step failed; the end of $1 is above. Calling the demo again repeats it." >&2
    exit 1
}

say "Preparing the corpus"
bash scripts/prepare_numbers.sh "$out/data" --train 40000 --valid 500 --test 500

train transformer --arch transformer --criterion label_smoothed_cross_entropy
translate transformer

train node_transformer --arch node_transformer --criterion label_smoothed_cross_entropy_with_path \
    --node-solver bosh3 --node-rtol 0.1 --node-atol 0.1
translate node_transformer

say "Report"
python scripts/lib/report.py transformer="$out/transformer" node_transformer="$out/node_transformer" \
    --out "$out/report.md"
