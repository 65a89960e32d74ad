#!/usr/bin/env python3
"""Compares the runs of scripts/train_multi30k.sh: a table, with sacrebleu's paired bootstrap against one.

python scripts/compare_runs.py checkpoints/multi30k --data data/multi30k
"""

import argparse
import sys
from pathlib import Path

from lib import compare


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, help="folder of the runs, or DIR of the script")
    add("--data", type=Path, default=Path("data/multi30k"), metavar="DIR", help="default: data/multi30k")
    add("--baseline", default="stock", metavar="NAME", help="run to compare with (default: stock)")
    add("--subset", default="test", metavar="NAME", help="test (2016, the default) or test1 (2017)")
    add("--samples", type=int, default=1000, metavar="N", help="of the bootstrap (default: 1000)")
    args = parser.parse_args()
    try:
        runs = compare.read_runs(args.folder, args.subset)
        references = compare.read_lines(args.data / "corpus" / f"{args.subset}.de")
        print(compare.table(runs, references, args.baseline, args.samples))
    except (OSError, ValueError) as error:
        sys.exit(f"{parser.prog}: error: {error}")


if __name__ == "__main__":
    main()
