#!/usr/bin/env python3
"""Converts a checkpoint of fairseq's transformer to node_transformer, or back.

By one Euler step per block, what is written as its solver, the node model gives the numbers of the stock one,
which is verified. From there, another solver is an option away:

  python scripts/convert_checkpoint.py --input stock.pt --output node.pt
  fairseq-generate DATA-BIN --user-dir fairseq_node --path node.pt --model-overrides "{'node_solver': 'rk4'}"
  fairseq-train DATA-BIN --user-dir fairseq_node --arch node_transformer --finetune-from-model node.pt ...

--restore-file node.pt goes on with the optimizer's state too, under --criterion ..._with_path.
"""

import argparse
import os
import sys

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from lib.conversion import ConversionError, convert, load  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", required=True, metavar="FILE", help="checkpoint of either architecture")
    parser.add_argument("--output", required=True, metavar="FILE", help="file to write")
    parser.add_argument(
        "--to",
        choices=("auto", "node", "stock"),
        default="auto",
        help="what to make of it (default: the other one)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    args = parser.parse_args()
    if (
        os.path.exists(args.output)
        and os.path.exists(args.input)
        and os.path.samefile(args.input, args.output)
    ):
        parser.error(f"--output {args.output} is the input; use another name")
    if os.path.exists(args.output) and not args.overwrite:
        parser.error(f"--output {args.output} exists; use another name, or --overwrite")
    folder = os.path.dirname(args.output) or "."
    if not os.path.isdir(folder):
        parser.error(f"--output {args.output}: there is no folder {folder}; make it first")
    try:
        result = convert(load(args.input), args.to)
    except ConversionError as error:
        sys.exit(f"{parser.prog}: error: {args.input}: {error}")
    except (OSError, RuntimeError) as error:
        sys.exit(f"{parser.prog}: error: {error}")
    # Whole or not at all.
    torch.save(result.state, args.output + ".part")
    os.replace(args.output + ".part", args.output)
    for note in result.notes:
        print(f"Note: {note}.")
    name = {"node": "node_transformer", "stock": "transformer"}[result.direction]
    print(
        f"{args.output}: {name}; by one Euler step, logits on random sentences differ by at most "
        f"{result.difference:.2g}"
    )


if __name__ == "__main__":
    main()
