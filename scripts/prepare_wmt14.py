#!/usr/bin/env python3
"""Makes fairseq's data of WMT14, English to German or French, from what was published.

Downloads the training corpora (addresses from mtdata, checksums, resumable), drops what is empty, too long,
too unequal, double, or in a test set, and counts it; learns joint sentencepiece pieces; encodes; binarizes.
newstest2013 validates, newstest2014 (all 3,003 sentences) tests; both come from sacrebleu. The plan with the
disk and time that it takes is printed first. It may be stopped at any time: a second call goes on.

  python scripts/prepare_wmt14.py --pair en-de --dry-run
  python scripts/prepare_wmt14.py --pair en-de --workers 8
  python scripts/prepare_wmt14.py --train-files a/train --valid-files a/dev --test-files a/test --out data/a

In the output folder: corpus/ (text, and counts.json of what was dropped), pieces/ (pieces.model), data-bin/.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from lib import cleaning, wmt  # noqa: E402
from lib.download import DownloadError  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pair", choices=sorted(wmt.CORPORA), default="en-de", help="languages (default: en-de)")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for everything (default: data/wmt14_en_de or ..._en_fr)",
    )
    add("--cache", type=Path, metavar="DIR", help="folder for downloads (default: downloads in --out)")
    add(
        *("--train-files", "--local"),
        nargs="+",
        type=Path,
        default=(),
        metavar="PREFIX",
        help="local corpora PREFIX.en and PREFIX.de (or .gz) instead of the downloads",
    )
    add("--valid-files", type=Path, metavar="PREFIX", help="a local validation set instead of newstest2013")
    add("--test-files", type=Path, metavar="PREFIX", help="a local test set instead of newstest2014")
    add("--vocab-size", type=int, default=32_000, metavar="N", help="pieces, both languages (default: 32000)")
    add("--max-words", type=int, default=250, metavar="N", help="words in a sentence (default: 250)")
    add("--max-ratio", type=float, default=2.0, metavar="R", help="longer over shorter sentence (default: 2)")
    add("--workers", type=int, default=1, metavar="N", help="processes of fairseq-preprocess (default: 1)")
    add("--dry-run", action="store_true", help="print the plan only")
    add("--ignore-disk", action="store_true", help="begin even if the disk seems too small")
    args = parser.parse_args()
    for name, least in (("vocab_size", 100), ("max_words", 1), ("max_ratio", 1), ("workers", 1)):
        if getattr(args, name) < least:
            option = "--" + name.replace("_", "-")
            parser.error(f"{option} is {getattr(args, name)}; use {least} or more")
    settings = wmt.Settings(
        pair=args.pair,
        out=args.out or Path("data") / f"wmt14_{args.pair.replace('-', '_')}",
        train=tuple(args.train_files),
        valid=args.valid_files,
        test=args.test_files,
        vocab_size=args.vocab_size,
        rules=cleaning.Rules(args.max_words, args.max_ratio),
        workers=args.workers,
        cache=args.cache,
    )
    try:
        preparation = wmt.Preparation(settings)
        print(preparation.table(), flush=True)
        if args.dry_run:
            return
        preparation.run(args.ignore_disk)
    except (cleaning.CorpusError, DownloadError, OSError, RuntimeError) as error:
        sys.exit(f"{parser.prog}: error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\n{parser.prog}: interrupted; what is complete is kept, call this again to go on")
    print(f"\n{settings.out}/data-bin is ready; next: DATA={settings.out} bash scripts/train_wmt14_en_de.sh")


if __name__ == "__main__":
    main()
