"""Runs side by side: what they cost, and whether their translations differ by more than chance."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from lib.report import Training, read_training


@dataclass(frozen=True)
class Run:
    """A trained model and its translations of a test set.

    Attributes:
        name: of its folder.
        training: what its log tells.
        hypotheses: translations, one per sentence.
        tokens_per_second: while translating.
    """

    name: str
    training: Training
    hypotheses: List[str]
    tokens_per_second: float

    @property
    def nll(self) -> float:
        """The best validation, in bits per piece: that of checkpoint_best.pt."""
        return min(statistics["nll_loss"] for statistics in self.training.valid.values())

    @property
    def minutes(self) -> float:
        """Time spent on updates, of a training that was stopped and went on too."""
        return sum(statistics["train_wall"] for statistics in self.training.train.values()) / 60

    def nfe(self, side: str) -> str:
        """Evaluations per sentence at the last validation; "-" for a stock model."""
        value = self.training.final.get(f"nfe_{side}")
        return "-" if value is None else f"{value:.1f}"


def read_lines(path: Path) -> List[str]:
    return path.read_text(encoding="utf-8").rstrip("\n").split("\n")


def read_runs(folder: Path, subset: str) -> List[Run]:
    """The runs in a folder that are complete.

    Raises:
        ValueError: there is none.
    """
    runs = []
    for hypotheses in sorted(folder.glob(f"*/{subset}.hyp")):
        run, log = hypotheses.parent, hypotheses.with_suffix(".log")
        said = hypotheses.with_suffix(".out").read_text(encoding="utf-8") + log.read_text(encoding="utf-8")
        speed = float(re.findall(r"Translated .*? ([\d.]+) tokens/s", said)[-1])
        runs.append(Run(run.name, read_training(run / "train.log"), read_lines(hypotheses), speed))
    if not runs:
        raise ValueError(f"{folder} has no run with {subset}.hyp; train one by scripts/train_multi30k.sh")
    return runs


def paired_bootstrap(
    runs: Sequence[Run], references: Sequence[str], samples: int
) -> Tuple[Dict[str, Tuple[float, float, float]], str]:
    """BLEU, half the width of its 95 % interval, and p against the first of the runs (1 for itself); and
    sacrebleu's signature."""
    metric = BLEU(references=[references])
    if len(runs) == 1:
        score = metric.corpus_score(runs[0].hypotheses, None).score
        return {runs[0].name: (score, float("nan"), 1.0)}, str(metric.get_signature())
    systems = [(run.name, run.hypotheses) for run in runs]
    test = PairedTest(systems, {"BLEU": metric}, [references], test_type="bs", n_samples=samples)
    signatures, scores = test()
    results = {
        name: (result.score, result.ci, 1.0 if result.p_value is None else result.p_value)
        for name, result in zip(scores["System"], scores["BLEU"])
    }
    results = {name.replace("Baseline: ", ""): value for name, value in results.items()}
    return results, signatures["BLEU"].format()


def table(runs: Sequence[Run], references: Sequence[str], baseline: str, samples: int) -> str:
    """A Markdown table, the baseline first.

    Raises:
        ValueError: there is no such run, or one has other sentences than the references.
    """
    names = [run.name for run in runs]
    if baseline not in names:
        raise ValueError(f"--baseline {baseline} is none of the runs; use one of {', '.join(names)}")
    for run in runs:
        if len(run.hypotheses) != len(references):
            raise ValueError(
                f"{run.name} has {len(run.hypotheses)} translations of {len(references)} sentences; remove "
                "its .out and translate again, or give its --data"
            )
    runs = sorted(runs, key=lambda run: run.name != baseline)
    scores, signature = paired_bootstrap(runs, references, samples)
    lines = [
        "| run | parameters | updates | valid nll | BLEU | p | NFE encoder, decoder | training | tokens/s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for run in runs:
        score, _, p = scores[run.name]
        # sacrebleu counts differences beyond 0, and so finds that a system differs from itself.
        same = run.hypotheses == runs[0].hypotheses
        significance = "" if run is runs[0] else "same" if same else f"{p:.3f}"
        lines.append(
            f"| {run.name} | {run.training.parameters:,} | {run.training.updates:,} | {run.nll:.3f} "
            f"| {score:.2f} | {significance} "
            f"| {run.nfe('encoder')}, {run.nfe('decoder')} | {run.minutes:.0f} min "
            f"| {run.tokens_per_second:.0f} |"
        )
    notes = (
        f"BLEU: sacrebleu `{signature}`; p: paired bootstrap against {baseline}; valid nll: bits per piece, "
        "the best validation; NFE: per sentence, all blocks, at the last validation; training: the "
        "updates alone; tokens/s: translating."
    )
    return "\n".join(lines) + "\n\n" + notes
