#!/usr/bin/env python3
"""Averages the weights of several checkpoints, with the options of fairseq's script of this name.

fairseq's packages do not ship their script, and it cannot load checkpoints on recent versions of torch.
"""

import argparse
import os
import re
import sys
from typing import Any, Dict, List

import torch
from tqdm import tqdm

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from fairseq_node.compat import load_checkpoint  # noqa: E402


def last_checkpoints(folder: str, count: int, by_update: bool, upper_bound=None) -> List[str]:
    """The newest checkpoints of a folder, newest first.

    Args:
        folder: what ``fairseq-train --save-dir`` was given.
        count: how many.
        by_update: those of ``--save-interval-updates``, not those of epochs.
        upper_bound: none later than this epoch or update.

    Raises:
        ValueError: there are fewer.
    """
    pattern = re.compile(r"checkpoint_\d+_(\d+)\.pt" if by_update else r"checkpoint(\d+)\.pt")
    found = []
    for name in os.listdir(folder):
        match = pattern.fullmatch(name)
        if match and (upper_bound is None or int(match.group(1)) <= upper_bound):
            found.append((int(match.group(1)), os.path.join(folder, name)))
    if len(found) < count:
        kind = "--num-update-checkpoints" if by_update else "--num-epoch-checkpoints"
        raise ValueError(f"{kind} is {count}, but {folder} has only {len(found)} of them; use at most that")
    return [path for _, path in sorted(found, reverse=True)[:count]]


def average(paths: List[str]) -> Dict[str, Any]:
    """The first checkpoint of ``paths`` with the mean of all their weights.

    Raises:
        ValueError: they are not of the same model, or no checkpoints of fairseq.
    """
    total: Dict[str, torch.Tensor] = {}
    first: Dict[str, Any] = {}
    for path in tqdm(paths, unit="checkpoint"):
        state = load_checkpoint(path)
        if not isinstance(state, dict) or "model" not in state:
            raise ValueError(f"{path} holds no model; give checkpoints that fairseq-train wrote")
        model = state["model"]
        first = first or state
        shapes = {name: value.shape for name, value in model.items()}
        if total and shapes != {name: value.shape for name, value in total.items()}:
            raise ValueError(f"{path} has other parameters than {paths[0]}; average checkpoints of one model")
        for name, value in model.items():
            # In float64: a sum of half-precision weights would lose their digits.
            value = value.double() if value.is_floating_point() else value
            total[name] = value.clone() if name not in total else total[name] + value
    for name, value in first["model"].items():
        mean = total[name] / len(paths) if value.is_floating_point() else total[name] // len(paths)
        first["model"][name] = mean.to(value.dtype)
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", required=True, nargs="+", help="checkpoints, or one folder of them")
    parser.add_argument("--output", required=True, help="file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--num-epoch-checkpoints", type=int, metavar="N", help="the last N of the folder")
    number.add_argument("--num-update-checkpoints", type=int, metavar="N", help="the last N by updates")
    parser.add_argument(
        "--checkpoint-upper-bound", type=int, metavar="N", help="none later than epoch or update N"
    )
    args = parser.parse_args()
    if os.path.exists(args.output) and not args.overwrite:
        parser.error(f"--output {args.output} exists; use another name, or --overwrite")
    folder = os.path.dirname(args.output) or "."
    if not os.path.isdir(folder):
        parser.error(f"--output {args.output}: there is no folder {folder}; make it first")
    paths = args.inputs
    by_update = args.num_update_checkpoints is not None
    count = args.num_update_checkpoints if by_update else args.num_epoch_checkpoints
    if count is None and args.checkpoint_upper_bound is not None:
        parser.error("--checkpoint-upper-bound is for --num-(epoch|update)-checkpoints; add one of these")
    if count is not None and len(paths) != 1:
        parser.error(f"--inputs names {len(paths)} paths; give one folder for its last checkpoints")
    if count is not None and count < 1:
        parser.error(f"cannot average the last {count} checkpoints; use 1 or more")
    try:
        if count is not None:
            paths = last_checkpoints(paths[0], count, by_update, args.checkpoint_upper_bound)
        state = average(paths)
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"{parser.prog}: error: {error}")
    # Whole or not at all.
    torch.save(state, args.output + ".part")
    os.replace(args.output + ".part", args.output)
    print(f"{args.output}: the mean of {', '.join(paths)}")


if __name__ == "__main__":
    main()
