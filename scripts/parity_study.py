#!/usr/bin/env python3
"""Trains architectures on parity over a grid and reports what they learn, at what cost, along what path.

Every training is a fairseq-train; its result is a file of its own in OUT/cells, so that a study that was
stopped goes on where it was, and one that is asked for more trains what is missing. At the end there are
OUT/report.md, OUT/results.csv and plots. All of the default grid takes days on two cores; every option that
takes a list selects a part of it.
"""

import argparse
import multiprocessing
import os
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

try:
    from lib import parity_grid, parity_report
    from tqdm import tqdm
except ModuleNotFoundError as missing:
    sys.exit(
        f"{missing.name} is missing: install the plugin with its plots extra, pip install -e '.[plots]'."
    )

QUICK = dict(
    architectures=["lstm", "transformer-2", "tied-4", "node-composed", "node-increment-norm"],
    max_lengths=[2, 8],
    penalties=["none", "arclength"],
    weights=[0.1],
    seeds=[1],
    updates=200,
)
FULL = dict(
    architectures=list(parity_grid.ARCHITECTURES),
    max_lengths=list(parity_grid.MAX_LENGTHS),
    penalties=list(parity_grid.PENALTIES),
    weights=list(parity_grid.WEIGHTS),
    seeds=list(parity_grid.SEEDS),
    updates=parity_grid.UPDATES,
)


def _list(kind, choices=None, above=None):
    """A type of comma-separated values for argparse."""

    def convert(text: str):
        try:
            values = [kind(value) for value in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no list such as 1,2 (of type {kind.__name__})"
            ) from None
        for value in values:
            if choices is not None and value not in choices:
                raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(map(str, choices))}")
            if above is not None and not value > above:
                raise argparse.ArgumentTypeError(f"{value!r} is too small; use more than {above}")
        return values

    return convert


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    lists = parser.add_argument_group("the grid", "comma-separated lists; each has a default")
    lists.add_argument(
        "--architectures",
        type=_list(str, list(parity_grid.ARCHITECTURES)),
        metavar="NAMES",
        help=", ".join(parity_grid.ARCHITECTURES),
    )
    lists.add_argument(
        "--max-lengths",
        type=_list(int, [n for n in parity_grid.LENGTHS if 2 * n in parity_grid.LENGTHS]),
        metavar="N",
        help=f"bits of the longest strings of a training. Default: {_text(FULL['max_lengths'])}",
    )
    lists.add_argument(
        "--penalties",
        type=_list(str, list(parity_grid.PENALTIES)),
        metavar="NAMES",
        help=f"on the path. Default: {_text(FULL['penalties'])}",
    )
    lists.add_argument(
        "--weights",
        type=_list(float, above=0),
        metavar="W",
        help=f"of a penalty. Default: {_text(FULL['weights'])}",
    )
    lists.add_argument("--seeds", type=_list(int), metavar="S", help=f"Default: {_text(FULL['seeds'])}")
    lists.add_argument(
        "--updates",
        type=int,
        metavar="N",
        help=f"of {parity_grid.BATCH} strings each. Default: {FULL['updates']}",
    )
    parser.add_argument("--quick", action="store_true", help="another default: a grid of some minutes")
    parser.add_argument("--out", type=Path, required=True, metavar="OUT", help="the study's folder")
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="trainings at a time. Default: all cores",
    )
    parser.add_argument("--report-only", action="store_true", help="train nothing: report what is there")
    parser.add_argument("--dry-run", action="store_true", help="print the commands of what is to be trained")
    return parser


def _text(values) -> str:
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def _start_worker() -> None:
    """What a process does once: fairseq takes seconds to import."""
    import torch

    torch.set_num_threads(1)  # the trainings share the cores
    os.chdir(ROOT)  # where --user-dir fairseq_node is

    from fairseq_cli import train  # noqa: F401

    import fairseq_node  # noqa: F401


def train(cells, out: Path, jobs: int) -> int:
    """Trains what is missing; returns how many cells failed."""
    context = multiprocessing.get_context("spawn")
    failed = 0
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker) as pool:
        running = {pool.submit(parity_grid.run_cell, cell, out): cell for cell in cells}
        try:
            for done in tqdm(as_completed(running), total=len(running), unit=" trainings", smoothing=0):
                error = done.exception()
                if error is not None:
                    failed += 1
                    name = running[done].name
                    tqdm.write(f"{name}: {error!r}; see {out / 'logs' / name}.log", file=sys.stderr)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            sys.exit("stopped; the same command goes on from here")
    return failed


def main() -> None:
    options = parser()
    args = options.parse_args()
    defaults = QUICK if args.quick else FULL
    grid = {name: getattr(args, name) or default for name, default in defaults.items()}
    if grid["updates"] < 1 or args.jobs < 1:
        options.error("--updates and --jobs are numbers of at least 1")
    cells = parity_grid.grid(**grid)
    out = args.out.resolve()
    missing = [] if args.report_only else parity_grid.pending(out, cells)
    if args.dry_run:
        for cell in missing:
            print("fairseq-train", shlex.join(cell.arguments(out / "work" / cell.name)))
        return
    out.mkdir(parents=True, exist_ok=True)
    if not args.report_only:
        print(f"{len(cells)} trainings, {len(cells) - len(missing)} of them done", file=sys.stderr)
    failed = train(missing, out, args.jobs) if missing else 0
    results = parity_report.read_results(out)
    if not results:
        sys.exit(f"--out {args.out} has no results; train first, without --report-only")
    command = shlex.join(["python", "scripts/parity_study.py", *sys.argv[1:]])
    print(parity_report.write_report(results, out, command))
    if failed:
        sys.exit(f"{failed} trainings failed; the same command tries them again")


if __name__ == "__main__":
    main()
