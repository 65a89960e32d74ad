#!/usr/bin/env python3
"""Translates with one checkpoint under many solvers and tolerances: BLEU, NFE and speed of each.

    python scripts/tolerance_sweep.py DATA-BIN --path CHECKPOINT --out sweep -- \\
        --beam 4 --remove-bpe sentencepiece --scoring sacrebleu

What follows -- goes to fairseq-generate. Trained with one solver, a model may translate with another: the
checkpoint stays as it is. Each setting's translations stay in OUT/SETTING; a sweep that was stopped goes
on after the last complete one, and a second call with more settings does only these. OUT/report.md,
OUT/results.csv and OUT/sweep.png hold the results.
"""

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib import sweep  # noqa: E402


def numbers(text: str) -> list:
    return [float(word) for word in text.split(",") if word]


def words(text: str) -> list:
    return [word for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="%(prog)s DATA-BIN --path CHECKPOINT --out DIR [options] [-- OPTIONS OF FAIRSEQ-GENERATE]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data", metavar="DATA-BIN", help="fairseq's binary data")
    parser.add_argument("--path", required=True, metavar="CHECKPOINT", help="of continuous depth")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for the results")
    parser.add_argument(
        "--solvers",
        type=words,
        default=["bosh3", "dopri5"],
        metavar="NAMES",
        help="adaptive ones (default: bosh3,dopri5)",
    )
    parser.add_argument(
        "--tolerances",
        type=numbers,
        default=[1, 0.1, 0.01, 0.001],
        metavar="NUMBERS",
        help="rtol = atol of each of them (default: 1,0.1,0.01,0.001)",
    )
    parser.add_argument(
        "--grids",
        type=words,
        default=["euler:1", "euler:4", "rk4:1", "rk4:2"],
        metavar="NAMES",
        help="fixed solvers with their steps (default: euler:1,euler:4,rk4:1,rk4:2)",
    )
    ours, theirs = sys.argv[1:], []
    if "--" in ours:
        ours, theirs = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    args = parser.parse_args(ours)
    logging.getLogger().setLevel(logging.WARNING)  # a module of fairseq's raises it to debugging
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        parser.error("matplotlib is not installed: pip install -e '.[plots]'")
    if not Path(args.path).is_file():
        parser.error(
            f"--path {args.path} is no file; give a checkpoint such as checkpoints/checkpoint_best.pt"
        )
    try:
        chosen = sweep.settings(args.solvers, args.tolerances, args.grids)
        args.out.mkdir(parents=True, exist_ok=True)
        same_as_before(args, theirs)
        results = list(sweep.sweep(chosen, args.data, args.path, theirs, args.out))
    except sweep.SweepError as error:
        sys.exit(f"{parser.prog}: error: {error}")
    sweep.write(results, args.out)
    print(sweep.table(results))
    print(f"Report: {args.out / 'report.md'}")


def same_as_before(args, theirs) -> None:
    """Refuses to mix results of different checkpoints, data or options in one folder."""
    made = f"{Path(args.path).resolve()} {Path(args.data).resolve()} {' '.join(theirs)}\n"
    note = args.out / "made_with"
    if note.exists() and note.read_text(encoding="utf-8") != made:
        raise sweep.SweepError(
            f"--out {args.out} holds results of {note.read_text().strip()}; use another folder"
        )
    note.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
