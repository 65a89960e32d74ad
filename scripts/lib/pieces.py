#!/usr/bin/env python3
"""Learns one sentencepiece model for both sides of a corpus and encodes the corpus with it."""

import argparse
import itertools
from pathlib import Path
from typing import Callable, Sequence

import sentencepiece


def learn(
    files: Sequence[Path], model: Path, vocab_size: int, longest: int = 16, coverage: float = 1.0
) -> None:
    """Writes ``model`` (NAME.model, and NAME.vocab beside it): BPE, of up to ``longest`` letters; the
    rarest characters, a share of 1 - ``coverage`` of the text, get no pieces."""
    sentencepiece.SentencePieceTrainer.train(
        input=[str(file) for file in files],
        model_prefix=str(model.with_suffix("")),
        model_type="bpe",
        vocab_size=vocab_size,
        max_sentencepiece_length=longest,
        character_coverage=coverage,
        num_threads=1,  # the same pieces on every machine
        minloglevel=1,
    )


def encode(model: Path, source: Path, target: Path, progress: Callable = iter) -> None:
    """Writes the pieces of every line; ``progress`` wraps the lines as tqdm does."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    with open(source, encoding="utf-8") as lines, open(target, "w", encoding="utf-8") as out:
        for line in progress(lines):
            print(*pieces.encode(line.rstrip("\n"), out_type=str), file=out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--corpus", type=Path, required=True, metavar="DIR", help="folder with SPLIT.LANGUAGE")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for pieces.model and SPLIT.LANGUAGE")
    add("--languages", nargs=2, default=["en", "de"], metavar="LANGUAGE", help="endings of the files")
    add(
        "--splits",
        nargs="+",
        default=["train", "valid", "test"],
        metavar="SPLIT",
        help="first: to learn from",
    )
    add("--vocab-size", type=int, default=400, metavar="N", help="pieces, both languages together")
    add("--longest", type=int, default=16, metavar="N", help="letters in a piece")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.out / "pieces.model"
    learnt = [args.corpus / f"{args.splits[0]}.{language}" for language in args.languages]
    learn(learnt, model, args.vocab_size, args.longest)
    for split, language in itertools.product(args.splits, args.languages):
        encode(model, args.corpus / f"{split}.{language}", args.out / f"{split}.{language}")


if __name__ == "__main__":
    main()
