"""Translates a test set under several solvers and tolerances, with one checkpoint."""

import csv
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Dict, Iterator, List, Sequence

from tqdm import tqdm

from fairseq_node.modules.solver import ADAPTIVE, FIXED


class SweepError(ValueError):
    """What cannot be swept, in one sentence."""


@dataclass(frozen=True)
class Setting:
    """One way to solve: an adaptive pair with its tolerance, or a fixed grid with its steps."""

    solver: str
    amount: float  # rtol = atol, or the number of steps

    @property
    def adaptive(self) -> bool:
        return self.solver in ADAPTIVE

    @property
    def name(self) -> str:
        return f"{self.solver}-{self.amount:g}"

    @property
    def overrides(self) -> Dict[str, object]:
        """For ``--model-overrides``."""
        if self.adaptive:
            return {"node_solver": self.solver, "node_rtol": self.amount, "node_atol": self.amount}
        return {"node_solver": self.solver, "node_steps": int(self.amount)}


@dataclass(frozen=True)
class Result:
    """What one setting gave; NFE are means per sentence, all blocks together."""

    solver: str
    amount: float
    bleu: float
    nfe_encoder: float
    nfe_decoder: float
    tokens_per_second: float
    unfinished: int


def settings(solvers: Sequence[str], tolerances: Sequence[float], grids: Sequence[str]) -> List[Setting]:
    """All that are asked for.

    Raises:
        SweepError: naming what is no adaptive solver, tolerance or grid.
    """
    result = []
    for solver in solvers:
        if solver not in ADAPTIVE:
            raise SweepError(f"--solvers: {solver} is no adaptive solver; use some of {', '.join(ADAPTIVE)}")
        for tolerance in tolerances:
            if not 0 < tolerance < float("inf"):
                raise SweepError(f"--tolerances: {tolerance:g}; use positive numbers such as 0.01")
            result.append(Setting(solver, tolerance))
    for grid in grids:
        solver, _, steps = grid.partition(":")
        if solver not in FIXED or not steps.isdigit() or int(steps) < 1:
            raise SweepError(
                f"--grids: {grid}; use SOLVER:STEPS such as rk4:2, with one of {', '.join(FIXED)}"
            )
        result.append(Setting(solver, int(steps)))
    return result


def run(setting: Setting, data: str, checkpoint: str, options: Sequence[str], out: Path) -> Result:
    """Translates with ``fairseq-generate`` into ``OUT/SETTING``; what is there already is only read.

    Raises:
        SweepError: with the end of what fairseq said.
    """
    folder = out / setting.name
    if not folder.exists():
        part = out / f"{setting.name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        package = Path(__file__).parents[2] / "fairseq_node"
        command = [
            *(sys.executable, "-m", "fairseq_cli.generate", data, "--user-dir", package),
            *("--task", "node_translation", "--path", checkpoint, "--results-path", part, *options),
            *("--model-overrides", repr(setting.overrides)),
        ]
        with (part / "log").open("w", encoding="utf-8") as log:
            code = subprocess.run(list(map(str, command)), stdout=log, stderr=log).returncode
        if code:
            raise SweepError(
                f"fairseq-generate failed with {setting.name}:\n{(part / 'log').read_text()[-2000:]}"
            )
        part.rename(folder)
    return read(setting, folder)


def read(setting: Setting, folder: Path) -> Result:
    """The result in a folder that ``fairseq-generate`` has filled."""
    (output,), (depth,) = folder.glob("generate-*.txt"), folder.glob("generate-*.jsonl")
    bleu = re.findall(r"BLEU4? = ([\d.]+)", output.read_text(encoding="utf-8"))
    speed = re.findall(r"([\d.]+) tokens/s\)", (folder / "log").read_text(encoding="utf-8"))
    sentences = [json.loads(line) for line in depth.read_text(encoding="utf-8").splitlines()]
    return Result(
        solver=setting.solver,
        amount=setting.amount,
        bleu=float(bleu[-1]) if bleu else float("nan"),
        nfe_encoder=statistics.mean(sentence["nfe_encoder"] for sentence in sentences),
        nfe_decoder=statistics.mean(sentence["nfe_decoder"] for sentence in sentences),
        tokens_per_second=float(speed[-1]),
        unfinished=sum(sentence["node_unfinished"] for sentence in sentences),
    )


def sweep(chosen: Sequence[Setting], *arguments) -> Iterator[Result]:
    """All results, one after another, with a progress bar; see :func:`run`."""
    for setting in tqdm(chosen, unit="setting"):
        yield run(setting, *arguments)


def table(results: Sequence[Result]) -> str:
    """The results as Markdown."""
    lines = [
        "| solver | rtol = atol, or steps | BLEU | NFE encoder | NFE decoder | tokens/s | unfinished |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for each in results:
        lines.append(
            f"| {each.solver} | {each.amount:g} | {each.bleu:.2f} | {each.nfe_encoder:.1f} | "
            f"{each.nfe_decoder:.1f} | {each.tokens_per_second:,.0f} | {each.unfinished} |"
        )
    return "\n".join(lines) + "\n"


def write(results: Sequence[Result], out: Path) -> None:
    """``results.csv``, ``report.md`` and ``sweep.png`` (BLEU and speed against NFE) in ``out``."""
    with (out / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [item.name for item in fields(Result)])
        writer.writeheader()
        writer.writerows(asdict(each) for each in results)
    (out / "report.md").write_text(
        table(results) + "\n![BLEU and speed against NFE](sweep.png)\n", encoding="utf-8"
    )
    plot(results, out / "sweep.png")


def plot(results: Sequence[Result], path: Path) -> None:
    """BLEU and tokens per second against NFE, a line for each solver."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for solver in dict.fromkeys(each.solver for each in results):
        mine = sorted((r for r in results if r.solver == solver), key=lambda r: r.nfe_encoder + r.nfe_decoder)
        nfe = [each.nfe_encoder + each.nfe_decoder for each in mine]
        style = "o-" if solver in ADAPTIVE else "s--"
        axes[0].plot(nfe, [each.bleu for each in mine], style, label=solver)
        axes[1].plot(nfe, [each.tokens_per_second for each in mine], style, label=solver)
        for x, each in zip(nfe, mine):
            axes[0].annotate(
                f"{each.amount:g}", (x, each.bleu), fontsize=7, xytext=(3, 3), textcoords="offset points"
            )
    for axis, label in zip(axes, ("BLEU", "tokens/s")):
        axis.set(xlabel="NFE per sentence, encoder and decoder", ylabel=label, xscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend(title="solver, with rtol or steps")
    temporary = path.with_name("part." + path.name)
    figure.savefig(temporary, dpi=150)
    pyplot.close(figure)
    os.replace(temporary, path)
