#!/usr/bin/env bash
# Gets Multi30k (task 1, English to German), learns joint pieces and binarizes it for fairseq.
#
#   bash scripts/prepare_multi30k.sh [DIR [SOURCE]]
#
# DIR     folder for the corpus, the pieces and data-bin (default: data/multi30k)
# SOURCE  folder with train, val, test_2016_flickr and test_2017_flickr as .en.gz and .de.gz; without it
#         they are downloaded from the public repository, 1.4 MB, and their checksums compared
#
# About ten seconds after the download. It may be stopped at any time; a second call goes on after the last
# complete step. Test sets: test (2016) and test1 (2017). Environment variables:
#   MULTI30K=SOURCE     what SOURCE is
#   MULTI30K_URL=URL    download from another place
#   MULTI30K_PIECES=N   pieces of both languages together (default: 6000)
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$scripts/lib/steps.sh"
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    usage
    exit
fi
[[ $# -le 2 ]] || die "takes DIR and SOURCE, but got $#: $*."
dir=${1:-data/multi30k}
from=${2:-${MULTI30K:-}}
url=${MULTI30K_URL:-https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw}
pieces=${MULTI30K_PIECES:-6000}
need fairseq-preprocess

# SHA-256 of the files of the public repository, of which every published number is.
sums='726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6  train.de.gz
d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f  train.en.gz
f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a  val.de.gz
14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28  val.en.gz
9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8  test_2016_flickr.de.gz
611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9  test_2016_flickr.en.gz
a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee  test_2017_flickr.de.gz
76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074  test_2017_flickr.en.gz'
declare -A splits=([train]=train [valid]=val [test]=test_2016_flickr [test1]=test_2017_flickr)

# get NAME: NAME.gz into $dir/raw, whole and as published.
get() {
    local name=$1.gz
    local file=$dir/raw/$name
    [[ ! -e $file ]] || return 0
    mkdir -p "$dir/raw"
    if [[ -n $from ]]; then
        [[ -r $from/$name ]] ||
            die "$from has no $name: give the folder with Multi30k's raw files of task 1, or none to download them."
        cp "$from/$name" "$file.part"
    else
        curl --fail --location --silent --show-error --retry 3 --output "$file.part" "$url/$name" ||
            die "$url/$name could not be downloaded (above): call this again, or give a folder that has it."
    fi
    gzip --test "$file.part" 2>/dev/null || {
        rm -f "$file.part"
        die "${from:-$url}/$name is broken or not complete: get it again."
    }
    if [[ $(sha256sum <"$file.part" | cut -d' ' -f1) != $(sed -n "s/  $name$//p" <<<"$sums") ]]; then
        [[ -n $from ]] || {
            rm -f "$file.part"
            die "$url/$name is not the file that numbers are published on (SHA-256): give a folder with yours instead."
        }
        echo "Warning: $from/$name is not the published file; BLEU cannot be compared with others'." >&2
    fi
    mv "$file.part" "$file"
}

make_corpus() {
    local split language
    mkdir -p "$1"
    for split in "${!splits[@]}"; do
        for language in en de; do
            gunzip --stdout "$dir/raw/${splits[$split]}.$language.gz" >"$1/$split.$language"
        done
        [[ $(wc -l <"$1/$split.en") == $(wc -l <"$1/$split.de") ]] ||
            die "${splits[$split]} has not as many lines in English as in German: get its files again."
    done
}

make_pieces() {
    python "$scripts/lib/pieces.py" --corpus "$dir/corpus" --vocab-size "$pieces" --splits train valid test test1 \
        --out "$1"
}

make_data_bin() {
    fairseq-preprocess --source-lang en --target-lang de --joined-dictionary --destdir "$1" \
        --trainpref "$dir/pieces/train" --validpref "$dir/pieces/valid" \
        --testpref "$dir/pieces/test,$dir/pieces/test1" 2>&1 | grep --line-buffered -E 'sents|Error|error'
}

same_options "$dir/options" "pieces $pieces"
for split in "${splits[@]}"; do
    for language in en de; do
        get "$split.$language"
    done
done
complete "$dir/corpus" make_corpus
complete "$dir/pieces" make_pieces
complete "$dir/data-bin" make_data_bin
