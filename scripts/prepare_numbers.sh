#!/usr/bin/env bash
# Makes the corpus of numbers, learns its pieces and binarizes it for fairseq.
#
#   bash scripts/prepare_numbers.sh [DIR [OPTIONS]]
#
# DIR      folder for the corpus, the pieces and data-bin (default: data/numbers)
# OPTIONS  of scripts/make_numbers_corpus.py: --train N, --valid N, --test N, --seed N
#
# It may be stopped at any time; a second call goes on after the last complete step.
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit
fi
dir=${1:-data/numbers}
[[ $# -gt 0 ]] && shift
if ! command -v fairseq-preprocess >/dev/null; then
    echo "fairseq-preprocess is not on the PATH: run bash scripts/install.sh and source .venv/bin/activate." >&2
    exit 1
fi

options="options: $*"
if [[ -e $dir/corpus/options && $(<"$dir/corpus/options") != "$options" ]]; then
    echo "$dir holds a corpus made with other $(<"$dir/corpus/options"); use another folder, or remove it." >&2
    exit 1
fi
mkdir -p "$dir"

# complete TARGET COMMAND: has COMMAND make TARGET under another name first, so that it is whole or absent.
complete() {
    local target=$1
    shift
    if [[ -e $target ]]; then
        echo "$target is there already."
        return
    fi
    echo "$target"
    rm -rf "$target.part"
    "$@" "$target.part"
    mv "$target.part" "$target"
}

make_corpus() {
    local out=${*: -1}
    python "$scripts/make_numbers_corpus.py" --out "$out" "${@:1:$#-1}"
    echo "$options" >"$out/options"
}

# Pieces of at most 8 letters: long enough for "vierund", too short for whole numbers such as
# "siebenundvierzig", whose order of words the model is to learn.
make_pieces() {
    python "$scripts/lib/pieces.py" --corpus "$dir/corpus" --vocab-size 400 --longest 8 --out "$1"
}

make_data_bin() {
    fairseq-preprocess --source-lang en --target-lang de --joined-dictionary --destdir "$1" \
        --trainpref "$dir/pieces/train" --validpref "$dir/pieces/valid" --testpref "$dir/pieces/test" \
        2>&1 | grep --line-buffered -E 'sents|Error|error'
}

complete "$dir/corpus" make_corpus "$@"
complete "$dir/pieces" make_pieces
complete "$dir/data-bin" make_data_bin
