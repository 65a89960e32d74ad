#!/usr/bin/env python3
"""Writes a parallel English-German corpus of number, date, time and price phrases with exact answers.

The three splits share no value and no phrase. The same seed gives the same files everywhere.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

try:
    from lib.numbers_corpus import SPLITS, corpus_files, write_corpus
    from tqdm import tqdm
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is missing: install the plugin with its data extra, pip install -e '.[data]'.")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for train.en, train.de, valid.en, ..."
    )
    parser.add_argument("--train", type=int, default=40000, metavar="N", help="phrases to train on")
    parser.add_argument("--valid", type=int, default=500, metavar="N", help="phrases to validate on")
    parser.add_argument("--test", type=int, default=1000, metavar="N", help="held-out phrases")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of phrases and of the split")
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus that is in DIR already")
    return parser


def main() -> None:
    options = parser()
    args = options.parse_args()
    sizes = {split: getattr(args, split) for split in SPLITS}
    for split, size in sizes.items():
        if size < 1:
            options.error(f"--{split} {size}: use a number of phrases of at least 1.")
    existing = [path for path in corpus_files(args.out) if path.exists()]
    if existing and not args.overwrite:
        options.error(f"--out: {existing[0]} exists already; use another folder or add --overwrite.")
    progress = partial(tqdm, total=sum(sizes.values()), unit=" phrases", mininterval=1)
    write_corpus(args.out, sizes, args.seed, progress)


if __name__ == "__main__":
    main()
