"""Tables and plots of the parity study, from the results of its cells."""

import csv
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Sequence, Tuple

from lib.parity_grid import has_path

#: A model has learned a length when it is right this often, in per cent.
SOLVED = 99.0
#: What tells one group of seeds from another.
KEYS = ("architecture", "max_length", "penalty", "weight", "updates")
PLOTS = (
    "accuracy_vs_length",
    "nfe_vs_length",
    "accuracy_vs_nfe",
    "arclength_vs_weight",
    "sensitivity_vs_length",
)


def read_results(out: Path) -> List[dict]:
    """Every result of a study, in the order of its names."""
    files = sorted((out / "cells").glob("*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (of the sample; NaN for a single value) over seeds."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        values = [value for value in values if not math.isnan(value)]
        if not values:
            return cls(math.nan, math.nan)
        return cls(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else math.nan)

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "-"
        digits = 1 if abs(self.mean) >= 10 or self.mean == 0 else 2
        spread = "" if math.isnan(self.std) else f" ± {self.std:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


def at(result: dict, length: int) -> dict:
    """What was seen at a length."""
    return next(seen for seen in result["lengths"] if seen["length"] == length)


def finished(results: Sequence[dict]) -> List[dict]:
    """Those whose training did not diverge: what was seen of the others ends there."""
    return [result for result in results if not result.get("diverged")]


def groups(results: Sequence[dict]) -> Dict[Tuple, List[dict]]:
    """The results that differ by their seed only, in a readable order."""
    found: Dict[Tuple, List[dict]] = {}
    for result in results:
        found.setdefault(tuple(result[key] for key in KEYS), []).append(result)
    # Models without a path first; then by name, length, and penalty, "none" before the others.
    return dict(sorted(found.items(), key=lambda item: (has_path(item[0][0]), _natural(item[0]))))


def _natural(key: Tuple) -> Tuple:
    architecture, max_length, penalty, weight, updates = key
    name, _, number = architecture.rpartition("-")
    order = (name, int(number)) if number.isdigit() else (architecture, 0)
    return (order, max_length, penalty != "none", penalty, weight, updates)


def write_csv(results: Sequence[dict], file: Path) -> None:
    """A row for each cell and length; one for a cell that diverged."""
    cell = [*KEYS, "seed", "seconds"]
    seen_columns = next((result["lengths"][0] for result in finished(results)), {})
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, [*cell, "diverged", *seen_columns])
        writer.writeheader()
        for result in results:
            known = {**{key: result[key] for key in cell}, "diverged": result.get("diverged")}
            writer.writerows({**known, **seen} for seen in result["lengths"] or [{}])


def _table(head: Sequence[str], rows: Sequence[Sequence]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def results_table(results: Sequence[dict]) -> str:
    """A row for each group, at the longest length that it was trained on."""
    rows = []
    for (architecture, max_length, penalty, weight, updates), members in groups(results).items():
        here = [at(result, max_length) for result in finished(members)]
        beyond = [at(result, 2 * max_length) for result in finished(members)]
        rows.append(
            [
                architecture,
                max_length,
                "none" if penalty == "none" else f"{penalty} {weight:g}",
                updates,
                len(members),
                *(Spread.of([seen["accuracy"] for seen in where]) for where in (here, beyond)),
                f"{sum(seen['accuracy'] >= SOLVED for seen in here)} of {len(members)}",
                len(members) - len(here) or "-",
                *(Spread.of([seen[name] for seen in here]) for name in ("nfe", "arclength", "sensitivity")),
            ]
        )
    head = ["architecture", "max length N", "penalty", "updates", "seeds", "accuracy at N, %"]
    head += ["at 2N, %", "learned", "diverged", "NFE at N", "arclength at N", "sensitivity at N"]
    return _table(head, rows)


def reach_table(results: Sequence[dict]) -> str:
    """Where each architecture stops learning, without a penalty."""
    reached: Dict[Tuple[str, int], Dict[int, bool]] = {}
    for (architecture, max_length, penalty, _, updates), members in groups(results).items():
        if penalty == "none":
            seen = [at(result, max_length) for result in finished(members)]
            learned = len(seen) == len(members) and all(there["accuracy"] >= SOLVED for there in seen)
            reached.setdefault((architecture, updates), {})[max_length] = learned
    rows = []
    for (architecture, updates), learned in reached.items():
        good = [length for length, every in learned.items() if every]
        rest = [length for length, every in learned.items() if not every]
        rows.append(
            [architecture, updates, max(good) if good else "none", min(rest) if rest else "none seen"]
        )
    return _table(
        ["architecture", "updates", "longest N that every seed learned", "shortest N that not"], rows
    )


def penalty_table(results: Sequence[dict]) -> str:
    """What a penalty changes at N, against the same seed without one."""
    plain = {
        (result["architecture"], result["max_length"], result["updates"], result["seed"]): result
        for result in finished(results)
        if result["penalty"] == "none"
    }
    rows = []
    for (architecture, max_length, penalty, weight, updates), members in groups(finished(results)).items():
        places = [(architecture, max_length, updates, result["seed"]) for result in members]
        pairs = [(result, plain[place]) for result, place in zip(members, places) if place in plain]
        if penalty == "none" or not pairs:
            continue
        changes = [
            Spread.of([at(a, max_length)[name] - at(b, max_length)[name] for a, b in pairs])
            for name in ("accuracy", "nfe", "arclength")
        ]
        rows.append([architecture, max_length, f"{penalty} {weight:g}", updates, len(pairs), *changes])
    head = ["architecture", "N", "penalty", "updates", "pairs", "accuracy, points", "NFE", "arclength"]
    return _table(head, rows) if rows else "No cell with a penalty has its like without one yet."


def write_report(results: Sequence[dict], out: Path, command: str) -> Path:
    """``report.md``, ``results.csv`` and the plots of a study.

    Args:
        results: at least one.
        out: the study's folder.
        command: that gave them.
    """
    write_csv(results, out / "results.csv")
    draw(finished(results), out)
    plots = "\n\n".join(f"![{name.replace('_', ' ')}]({name}.svg)" for name in PLOTS)
    report = out / "report.md"
    report.write_text(
        f"""# Parity study

`{command}`: {len(results)} trainings. Means ± standard deviations are over seeds, each with other weights
and other strings. N is the longest length of a training, 2N twice that; learned: seeds right on at
least {SOLVED:g} % at N; diverged: seeds whose training fairseq ended since its gradients were no longer
finite, in no mean here. NFE are evaluations of the vector field per string, all blocks together;
sensitivity is the mean change of the log-odds of the answer when one bit is flipped.

{results_table(results)}

## Where does each architecture stop learning?

{reach_table(results)}

## What does a penalty change?

At N, against the same seed without a penalty.

{penalty_table(results)}

## Plots

{plots}

`results.csv` has every cell at every length.
""",
        encoding="utf-8",
    )
    return report


def draw(results: Sequence[dict], out: Path) -> None:
    """The plots, as ``.svg``: readable in print, lines told apart by marker and dash as well as colour."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "parity"  # the same results, the same file
    styles = _styles(results)
    plain = [result for result in results if result["penalty"] == "none"]
    with_path = [result for result in results if has_path(result["architecture"])]
    plain_path = [result for result in with_path if result in plain]
    change = "change of log-odds per flip"
    _curves(plain, styles, out / "accuracy_vs_length.svg", "accuracy", "accuracy, %", chance=50)
    _curves(plain_path, styles, out / "nfe_vs_length.svg", "nfe", "NFE per string")
    _curves(plain, styles, out / "sensitivity_vs_length.svg", "sensitivity", change, hahn=True)
    _accuracy_vs_nfe(with_path, styles, out / "accuracy_vs_nfe.svg")
    _arclength_vs_weight(with_path, styles, out / "arclength_vs_weight.svg")


STYLES = [(color, marker) for marker in "os^D" for color in ("C0", "C1", "C2", "C3", "C4", "C5")]


def _styles(results: Sequence[dict]) -> Dict[str, Dict]:
    names = list(dict.fromkeys(key[0] for key in groups(results)))
    return {
        name: dict(color=color, marker=marker, markersize=4, linewidth=1)
        for name, (color, marker) in zip(names, STYLES)
    }


def _curves(results, styles, file: Path, quantity: str, label: str, chance=None, hahn=False) -> None:
    """A panel for each longest length of training, a line for each architecture, against the length."""
    longest = sorted({result["max_length"] for result in results}) or [1]
    figure, panels = _figure(len(longest))
    for panel, max_length in zip(panels, longest):
        lines = {}
        for key, members in groups(results).items():
            if key[1] != max_length:
                continue
            lengths = [seen["length"] for seen in members[0]["lengths"]]
            spreads = [Spread.of([at(r, length)[quantity] for r in members]) for length in lengths]
            values, errors = [s.mean for s in spreads], [s.std for s in spreads]
            panel.errorbar(lengths, values, errors, label=key[0], capsize=2, **styles[key[0]])
            lines[key[0]] = dict(zip(lengths, values))
        panel.axvline(max_length, color="0.6", linestyle=":", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_title(f"trained on up to {max_length} bits", fontsize=9)
        if chance is not None:
            panel.axhline(chance, color="0.6", linestyle="--", linewidth=1)
        if hahn and lines:
            top = max(line[1] for line in lines.values())
            lengths = [1, 2 * max_length]
            panel.plot(lengths, [top / n for n in lengths], color="black", linestyle="--", label="1/n")
            panel.set_yscale("log")
            panel.yaxis.set_minor_formatter("")
    _finish(figure, panels, "bits n", label, file)


def _accuracy_vs_nfe(results, styles, file: Path) -> None:
    figure, (panel,) = _figure(1)
    for name, style in styles.items():
        members = [at(r, r["max_length"]) for r in results if r["architecture"] == name]
        if not members:
            continue
        points = [seen["nfe"] for seen in members], [seen["accuracy"] for seen in members]
        panel.plot(*points, linestyle="", label=name, color=style["color"], marker=style["marker"], alpha=0.7)
    _finish(figure, [panel], "NFE per string at n = N", "accuracy at n = N, %", file)


def _arclength_vs_weight(results, styles, file: Path) -> None:
    penalised = {(r["architecture"], r["max_length"]) for r in results if r["penalty"] != "none"}
    dashes = dict(
        zip(sorted({max_length for _, max_length in penalised}), ("-", "--", "-.", ":", (0, (5, 5))))
    )
    figure, panels = _figure(2)
    for panel, penalty in zip(panels, ("arclength", "kinetic")):
        for architecture, max_length in sorted(penalised):
            members: Dict[float, List[float]] = {}
            for r in results:
                mine = (r["architecture"], r["max_length"]) == (architecture, max_length)
                if mine and r["penalty"] in ("none", penalty):
                    members.setdefault(r["weight"], []).append(at(r, max_length)["arclength"])
            weights = sorted(members)
            spreads = [Spread.of(members[weight]) for weight in weights]
            label = f"{architecture}, N = {max_length}"
            values, errors = [s.mean for s in spreads], [s.std for s in spreads]
            style = {**styles[architecture], "linestyle": dashes[max_length]}
            panel.errorbar(weights, values, errors, label=label, capsize=2, **style)
        panel.set_xscale("symlog", linthresh=1e-3)
        panel.set_xlim(left=-2e-4)
        panel.set_title(f"{penalty} penalised", fontsize=9)
    _finish(figure, panels, "weight", "arclength at n = N", file)


def _figure(count: int):
    from matplotlib.figure import Figure

    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(3.4 * columns, 2.8 * rows + 0.8), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in panels[count:]:
        panel.set_visible(False)
    return figure, panels[:count]


def _finish(figure, panels, x: str, y: str, file: Path) -> None:
    labelled: Dict[str, Callable] = {}
    for panel in panels:
        panel.set_xlabel(x)
        panel.set_ylabel(y)
        panel.grid(color="0.9")
        for handle, label in zip(*panel.get_legend_handles_labels()):
            labelled.setdefault(label, handle)
    if labelled:
        columns = min(len(labelled), 2 * figure.axes[0].get_gridspec().ncols)
        figure.legend(
            labelled.values(), labelled.keys(), loc="outside lower center", ncols=columns, fontsize=7
        )
    figure.savefig(file, metadata={"Date": None})
