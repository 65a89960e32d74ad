#!/usr/bin/env python3
"""Reports how deep a continuous-depth model is, sentence by sentence, as one HTML file.

  python scripts/depth_report.py --path checkpoints/checkpoint_best.pt --data DATA-BIN --out report.html

Evaluations per sentence, against length and loss; arclength; step sizes over depth; the paths of one
sentence's pieces in two dimensions; BLEU against evaluations under other tolerances. A stock checkpoint of
fairseq's transformer is reported on as the vector field that its layers are. What was measured is also
written to OUT.json, from which a second call goes on if this one is stopped.
"""

import argparse
import json
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from lib import depth, depth_html  # noqa: E402
from tqdm import tqdm  # noqa: E402

from fairseq_node.modules.solver import ADAPTIVE  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--path", required=True, metavar="FILE", help="checkpoint, of continuous depth or stock")
    add("--data", required=True, metavar="DIR", help="fairseq's binary data")
    add("--out", type=Path, required=True, metavar="FILE", help="the report, such as report.html")
    add("--overwrite", action="store_true", help="replace the report if it exists")
    add("--gen-subset", default="test", metavar="NAME", help="set to report on (default: test)")
    add("--sentences", type=int, metavar="N", help="so many of the set, evenly spread (default: all)")
    add("--solver", choices=ADAPTIVE, help="default: the checkpoint's, or bosh3 if that is no adaptive one")
    add("--tolerance", type=float, metavar="X", help="relative and absolute (default: the checkpoint's)")
    add("--sentence", type=int, default=0, metavar="N", help="whose paths to show (default: 0, the first)")
    add(
        "--tolerances",
        type=float,
        nargs="*",
        default=[1.0, 0.1, 0.01, 0.001],
        metavar="X",
        help="of the curve of BLEU; none for no curve (default: 1 0.1 0.01 0.001)",
    )
    add("--bleu-sentences", type=int, default=200, metavar="N", help="for the curve (default: 200)")
    add("--beam", type=int, default=5, metavar="N", help="(default: 5)")
    add("--max-len-b", type=int, default=200, metavar="N", help="longest translation (default: 200)")
    add("--remove-bpe", default="sentencepiece", metavar="HOW", help="as of fairseq (default: sentencepiece)")
    add("--max-tokens", type=int, default=4000, metavar="N", help="in a batch (default: 4000)")
    add("--cpu", action="store_true", help="use no GPU")
    args = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)  # a module of fairseq's raises it to debugging
    if args.out.exists() and not args.overwrite:
        parser.error(f"--out {args.out} exists; use another name, or --overwrite")
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {args.out.parent}; make it first")
    for name in ("sentences", "bleu_sentences", "beam", "max_tokens", "max_len_b"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; use 1 or more")
    for value in [*args.tolerances, *([] if args.tolerance is None else [args.tolerance])]:
        if not 0 < value < float("inf"):
            parser.error(f"{value} is no tolerance; use a positive number such as 0.01")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        sys.exit(f"{parser.prog}: error: matplotlib is not installed: pip install -e '.[plots]'")
    try:
        report = measure(args)
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"{parser.prog}: error: {error}")
    part = args.out.with_name(args.out.name + ".part")
    part.write_text(depth_html.render(report), encoding="utf-8")
    os.replace(part, args.out)
    print(f"Report: {args.out}")


def measure(args) -> depth_html.Report:
    """Everything that the report shows; measured, or read from OUT.json."""
    loaded = load(args)
    config = loaded.config
    sets = depth.batches(loaded, args.gen_subset, args.max_tokens, args.sentences)
    trajectories = depth.trajectories(loaded, args.gen_subset, args.sentence)
    known = Measured(args, config)

    sentences = known.get(
        "sentences",
        lambda: [
            asdict(each) for batch in tqdm(sets, desc="measuring") for each in depth.measure(loaded, batch)
        ],
    )
    # Of every batch a share, for memory and for plots that can be opened: every length is there.
    some = depth.batches(loaded, args.gen_subset, args.max_tokens, min(args.sentences or 300, 300))
    steps = known.get(
        "steps",
        lambda: [asdict(each) for batch in tqdm(some, desc="steps") for each in depth.steps(loaded, batch)],
    )
    points = []
    if args.tolerances:
        few = depth.batches(loaded, args.gen_subset, args.max_tokens, args.bleu_sentences)
        for tolerance in sorted(args.tolerances, reverse=True):
            label = f"{config.solver}, {tolerance:g}"
            loaded.with_tolerance(tolerance)
            points.append(known.get(label, lambda label=label: measure_point(args, loaded, label, few)))
        label = "euler, 1 step"
        points.append(
            known.get(label, lambda: measure_point(args, load(args, node_solver="euler"), label, few))
        )
    notes = []
    if loaded.converted:
        notes.append(
            "The checkpoint is a stock Transformer: its layers were trained as single Euler steps, and "
            "nothing made them good vector fields for another solver."
        )
    return depth_html.Report(
        title=f"{args.path} on {args.gen_subset}",
        setting=f"solver {config.solver}, relative tolerance {config.rtol:g}, absolute {config.atol:g}, "
        "steps of its own for every sentence",
        sentences=[depth.Sentence(**each) for each in sentences],
        steps=[depth.Step(**each) for each in steps],
        trajectories=trajectories,
        sentence=args.sentence,
        points=[depth.Point(**each) for each in points],
        bleu_sentences=min(args.bleu_sentences, len(loaded.task.dataset(args.gen_subset))),
        notes=notes,
    )


def load(args, **options) -> depth.Loaded:
    """The model with the solver that was asked for; steps are always each sentence's own."""
    options = {"node_step_control": "sentence", "node_gradient": "backprop", **options}
    if args.tolerance is not None:
        options.update(node_rtol=args.tolerance, node_atol=args.tolerance)
    if args.solver is not None:
        options.setdefault("node_solver", args.solver)
    loaded = depth.load(args.path, args.data, args.cpu, **options)
    if "node_solver" not in options and not loaded.config.adaptive:
        loaded = depth.load(args.path, args.data, args.cpu, node_solver="bosh3", **options)
    return loaded


def measure_point(args, loaded, label, batches):
    progress = lambda items: tqdm(items, desc=label)  # noqa: E731
    search = {"beam": args.beam, "max_len_b": args.max_len_b}
    return asdict(depth.point(loaded, label, batches, search, args.remove_bpe, progress))


class Measured:
    """What was measured, by name, in a file: each result as soon as it is there."""

    def __init__(self, args, config):
        self.path = args.out.with_name(args.out.name + ".json")
        stat = os.stat(args.path)
        self.identity = {
            **{
                name: getattr(args, name)
                for name in ("path", "data", "gen_subset", "sentences", "beam", "max_len_b")
            },
            **{name: getattr(args, name) for name in ("bleu_sentences", "remove_bpe")},
            **{"size": stat.st_size, "changed": stat.st_mtime, "config": asdict(config)},
        }
        self.results = {}
        if self.path.exists():
            stored = json.loads(self.path.read_text())
            if stored["of"] == self.identity:
                self.results = stored["results"]

    def get(self, name, compute):
        if name not in self.results:
            self.results[name] = compute()
            part = self.path.with_name(self.path.name + ".part")
            part.write_text(json.dumps({"of": self.identity, "results": self.results}))
            os.replace(part, self.path)
        return self.results[name]


if __name__ == "__main__":
    main()
