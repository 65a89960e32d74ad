# What the recipes share; to be sourced. Every step is whole or absent, and a second call passes it over.

# usage: the comment at the head of the script, which is its help.
usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"
}

# die SENTENCE: ends the script; what was asked, what is wrong, what to do.
die() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# need COMMAND...: they are on the PATH.
need() {
    local each
    for each in "$@"; do
        command -v "$each" >/dev/null ||
            die "$each is not on the PATH: run bash scripts/install.sh data, and source .venv/bin/activate."
    done
}

# say WHAT: a heading, with the time that has passed.
SECONDS=0
say() {
    printf '\n== %s (after %d:%02d:%02d)\n' "$1" $((SECONDS / 3600)) $((SECONDS / 60 % 60)) $((SECONDS % 60))
}

# complete TARGET COMMAND: has COMMAND make TARGET under another name first, so that it is whole or absent.
complete() {
    local target=$1
    shift
    if [[ -e $target ]]; then
        echo "$target is there already."
        return
    fi
    echo "$target"
    mkdir -p "$(dirname "$target")"
    rm -rf "$target.part"
    "$@" "$target.part"
    mv "$target.part" "$target"
}

# logged LOG PATTERN COMMAND: appends all that COMMAND says to LOG and shows the lines with PATTERN, without
# date and level.
logged() {
    local log=$1 pattern=$2
    shift 2
    "$@" 2>&1 | tee -a "$log" | sed -u -nE "/$pattern/{s/^.*(INFO|ERROR)( \\||:)//;p;}" ||
        {
            tail -n 20 "$log" >&2
            die "this step failed; the end of $log is above. Calling this again goes on from here."
        }
}

# same_options FILE OPTIONS...: refuses to go on in a folder that was begun with other options.
same_options() {
    local file=$1
    shift
    if [[ ! -e $file ]]; then
        mkdir -p "$(dirname "$file")"
        printf '%s\n' "$*" >"$file.part"
        mv "$file.part" "$file"
    elif [[ $(<"$file") != "$*" ]]; then
        die "$(dirname "$file") was begun with other options ($(<"$file"); now: $*): use another folder, or remove it."
    fi
}

# translate DATA-BIN CHECKPOINT SUBSET OUT OPTIONS...: fairseq-generate, into the file OUT.out with messages in
# OUT.log; then the translations alone, in the order of the set, in OUT.hyp.
translate() {
    local data=$1 checkpoint=$2 subset=$3 out=$4
    shift 4
    if [[ ! -e $out.out ]]; then
        rm -f "$out.log"
        fairseq-generate "$data" --user-dir "$user_dir" --path "$checkpoint" --gen-subset "$subset" \
            --remove-bpe sentencepiece --log-format simple --log-interval 10 "$@" >"$out.out.part" 2>"$out.log" || {
            tail -n 20 "$out.log" >&2
            die "translating $subset failed; the end of $out.log is above."
        }
        mv "$out.out.part" "$out.out"
    fi
    grep -h 'Translated' "$out.out" "$out.log" | sed 's/^.*INFO *|//' || true
    grep '^D-' "$out.out" | sort -t- -k2n | cut -f3- >"$out.hyp.part"
    mv "$out.hyp.part" "$out.hyp"
}

# bleu REFERENCE OUT: the number to publish, of OUT.hyp, into OUT.bleu with its signature.
bleu() {
    local reference=$1 out=$2
    [[ $(wc -l <"$reference") == $(wc -l <"$out.hyp") ]] ||
        die "$out.hyp has not one line for each of $reference: remove $out.out and call this again."
    sacrebleu "$reference" --input "$out.hyp" --metrics bleu --width 2 --format text >"$out.bleu.part"
    mv "$out.bleu.part" "$out.bleu"
    cat "$out.bleu"
}
