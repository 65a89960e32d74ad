#!/usr/bin/env python3
"""Compares trained models by what fairseq wrote about them: a table, and curves where matplotlib is."""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import sacrebleu

Statistics = Dict[str, float]


class Translation(NamedTuple):
    source: str
    reference: str
    hypothesis: str


class Bleu(NamedTuple):
    score: float
    signature: str


@dataclass(frozen=True)
class Training:
    """What a training log tells.

    Attributes:
        parameters: how many the model has.
        train, valid: statistics by number of updates, under fairseq's names (nll_loss, nfe_encoder, ...).
    """

    parameters: int
    train: Dict[int, Statistics]
    valid: Dict[int, Statistics]

    @property
    def updates(self) -> int:
        # The last interval of the log may be unfinished; the last validation comes after it.
        return max(*self.train, *self.valid)

    @property
    def seconds(self) -> float:
        """Time spent on updates and the validations between them.

        From the updates per second in every interval of the log: fairseq's own clock starts again when
        a training is resumed.
        """
        total, before = 0.0, 0
        for updates, statistics in sorted(self.train.items()):
            total += (updates - before) / statistics["ups"]
            before = updates
        return total

    @property
    def final(self) -> Statistics:
        """The last validation."""
        return self.valid[max(self.valid)]


@dataclass(frozen=True)
class Model:
    """A trained model and its translations of the held-out set."""

    name: str
    training: Training
    translations: List[Translation]
    tokens_per_second: float


def read_training(log: Path) -> Training:
    """Reads the log of fairseq-train (``--log-format simple``); of a resumed training, all of it.

    Raises:
        ValueError: if there is no training in it, or none that validated.
    """
    text = log.read_text(encoding="utf-8")
    parameters = re.findall(r"num\. shared model params: ([\d,]+)", text)
    train, valid = {}, {}
    for line in text.splitlines():
        # Updates that were lost with a killed run come again later in the log, and replace these.
        if " | train_inner | " in line:
            statistics = _numbers(re.findall(r"(\w+)=([^\s,]+)", line))
            train[int(statistics["num_updates"])] = statistics
        elif " | valid on 'valid' subset | " in line:
            statistics = _numbers(re.findall(r"\| (\w+) ([^\s|]+)", line))
            valid[int(statistics["num_updates"])] = statistics
    if not (parameters and train and valid):
        raise ValueError(f"{log} is not the log of a training with a validation; train again.")
    return Training(int(parameters[-1].replace(",", "")), train, valid)


def _numbers(pairs: Sequence[Tuple[str, str]]) -> Statistics:
    result = {}
    for name, value in pairs:
        try:
            result[name] = float(value)
        except ValueError:
            continue
    return result


def read_translations(output: Path, log: Path) -> Tuple[List[Translation], float]:
    """Reads what fairseq-generate wrote to standard output and error: the translations in the order of
    the set, and tokens/s, which some builds of fairseq write to the one and some to the other.

    Raises:
        ValueError: if it is not complete.
    """
    lines: Dict[str, Dict[int, str]] = {"S": {}, "T": {}, "H": {}}
    speed = None
    text = output.read_text(encoding="utf-8") + log.read_text(encoding="utf-8")
    for line in text.splitlines():
        match = re.match(r"([STH])-(\d+)\t(.*)$", line)
        if match:
            kind, number, text = match.groups()
            lines[kind][int(number)] = text.split("\t", 1)[1] if kind == "H" else text
        elif "Translated " in line:
            speed = float(re.search(r"([\d.]+) tokens/s", line).group(1))
    if speed is None or not lines["S"].keys() == lines["T"].keys() == lines["H"].keys():
        raise ValueError(f"{output} is not the complete output of fairseq-generate; translate again.")
    return [Translation(*(lines[kind][number] for kind in "STH")) for number in sorted(lines["S"])], speed


def read_model(name: str, folder: Path) -> Model:
    """Reads train.log, test.out and test.log in a folder."""
    translations, speed = read_translations(folder / "test.out", folder / "test.log")
    return Model(name, read_training(folder / "train.log"), translations, speed)


def exact_match(translations: Sequence[Translation]) -> float:
    """The share of translations that are the reference, letter by letter, in per cent."""
    return 100 * sum(each.hypothesis == each.reference for each in translations) / len(translations)


def bleu(translations: Sequence[Translation]) -> Bleu:
    metric = sacrebleu.BLEU()
    score = metric.corpus_score(
        [each.hypothesis for each in translations], [[each.reference for each in translations]]
    )
    return Bleu(score.score, str(metric.get_signature()))


def depth(model: Model, side: str) -> str:
    """Mean evaluations per sentence at the last validation; "-" for a model that does not solve."""
    nfe = model.training.final.get(f"nfe_{side}")
    return "-" if nfe is None else f"{nfe:.1f}"


def table(models: Sequence[Model]) -> str:
    """A Markdown table that also reads well as plain text."""
    rows = [
        ("", *(model.name for model in models)),
        ("BLEU", *(f"{bleu(model.translations).score:.1f}" for model in models)),
        ("exact match", *(f"{exact_match(model.translations):.1f} %" for model in models)),
        ("NFE encoder", *(depth(model, "encoder") for model in models)),
        ("NFE decoder", *(depth(model, "decoder") for model in models)),
        ("tokens/s, translating", *(f"{model.tokens_per_second:.0f}" for model in models)),
        ("training time", *(f"{model.training.seconds:.0f} s" for model in models)),
        ("updates", *(f"{model.training.updates}" for model in models)),
        ("parameters", *(f"{model.training.parameters:,}" for model in models)),
    ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in rows
    ]
    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def examples(model: Model, most: int = 5) -> str:
    """Some right and some wrong translations, as Markdown lists."""
    wrong = [each for each in model.translations if each.hypothesis != each.reference]
    right = [each for each in model.translations if each.hypothesis == each.reference]
    return "\n".join(
        [
            *(f"- {each.source} → {each.hypothesis}" for each in right[:most]),
            *(f"- {each.source} → **{each.hypothesis}**, not {each.reference}" for each in wrong[:most]),
        ]
    )


def report(models: Sequence[Model], plot: Optional[str] = None) -> str:
    """The report as Markdown; ``plot`` is the address of the curves."""
    of_interest = models[-1]
    phrases, signature = len(of_interest.translations), bleu(of_interest.translations).signature
    sections = [
        f"# Translating numbers: {' and '.join(model.name for model in models)}",
        table(models),
        f"Held out: {phrases} phrases. BLEU is `{signature}`; "
        "an exact match is right to the letter. NFE is the mean number of evaluations of the vector field "
        "per sentence, all blocks together, over the validation set with the final weights; a layer of "
        "the stock model is one evaluation. Training time is that of updates and validations.",
    ]
    if plot:
        sections.append(f"![Validation loss, and NFE during training]({plot})")
    sections.append(f"What {of_interest.name} makes of the held-out phrases:\n\n{examples(of_interest)}")
    return "\n\n".join(sections) + "\n"


def draw(models: Sequence[Model], path: Path) -> None:
    """Validation loss and NFE over updates; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (loss, depth) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for model in models:
        valid = sorted(model.training.valid.items())
        loss.semilogy([n for n, _ in valid], [s["nll_loss"] for _, s in valid], marker=".", label=model.name)
        for side in ("encoder", "decoder"):
            nfe = {n: s.get(f"nfe_{side}") for n, s in sorted(model.training.train.items())}
            if None not in nfe.values():
                depth.plot(list(nfe), list(nfe.values()), label=side)
    loss.set(xlabel="updates", ylabel="bits per piece, validation")
    depth.set(xlabel="updates", ylabel="evaluations per sentence (NFE)", ylim=(0, None))
    for axes in (loss, depth):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "models",
        nargs="+",
        metavar="NAME=DIR",
        help="a model and its folder: train.log of fairseq-train, test.out and test.log of fairseq-generate",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the report; replaced if there"
    )
    args = parser.parse_args()
    models = []
    for each in args.models:
        name, equals, folder = each.partition("=")
        if not equals:
            parser.error(f"{each}: use NAME=DIR, for example transformer=demo/transformer.")
        try:
            models.append(read_model(name, Path(folder)))
        except (OSError, ValueError) as error:
            parser.exit(1, f"{error}\n")
    plot: Optional[Path] = args.out.with_name("curves.png")
    try:
        draw(models, plot)
    except ImportError:
        plot = None
        print("No curves: matplotlib is not installed (pip install -e '.[plots]').")
    args.out.write_text(report(models, plot and plot.name), encoding="utf-8")
    print(table(models))
    print(f"\nBLEU is {bleu(models[-1].translations).signature}\nReport: {args.out}")


if __name__ == "__main__":
    main()
