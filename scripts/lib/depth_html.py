"""The depth report as one HTML file: plots by matplotlib within it, and words for what they show."""

from __future__ import annotations

import html
import io
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

from lib.depth import SIDES, Point, Sentence, Step, Trajectories

COLOURS = {"encoder": "#2060a0", "decoder": "#c05020"}
STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em }
h2 { font-size: 1.15em; margin-top: 2.2em; border-top: 1px solid #ddd; padding-top: 1em }
svg { max-width: 100%; height: auto } table { border-collapse: collapse } code { background: #f4f4f4 }
td, th { padding: .2em .8em; text-align: right; border-bottom: 1px solid #eee }
td:first-child { text-align: left }"""


@dataclass
class Report:
    """Everything that the report shows.

    Attributes:
        title: the checkpoint and the test set.
        setting: the solver, in words.
        sentences: what each took.
        steps: accepted steps of some of them.
        trajectories: of the chosen sentence, by side.
        sentence: its number.
        points: the curve, or empty.
        bleu_sentences: how many sentences the curve is of.
        notes: further sentences for the reader.
    """

    title: str
    setting: str
    sentences: List[Sentence]
    steps: List[Step]
    trajectories: Dict[str, Trajectories]
    sentence: int
    points: List[Point]
    bleu_sentences: int
    notes: List[str]


def correlation(x: Sequence[float], y: Sequence[float]) -> Optional[float]:
    """Pearson's; None where one of them does not vary."""
    if len(x) < 2 or len(set(x)) < 2 or len(set(y)) < 2:
        return None
    mx, my = statistics.fmean(x), statistics.fmean(y)
    covariance = sum((a - mx) * (b - my) for a, b in zip(x, y))
    return covariance / (sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y)) ** 0.5


def render(report: Report) -> str:
    """The whole file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    sections = [
        ("In short", _summary(report), ""),
        (
            "How many evaluations a sentence takes",
            _nfe_words(report.sentences),
            _plot(_draw_nfe, report.sentences),
        ),
        (
            "Does length decide?",
            _relation_words(report.sentences, "length"),
            _plot(_draw_against, report.sentences, "length"),
        ),
        (
            "Are hard sentences deeper?",
            _relation_words(report.sentences, "loss"),
            _plot(_draw_against, report.sentences, "loss"),
        ),
        (
            "How far the states travel",
            "Arclength: the length of a piece's path from its embedding to the output of a side, mean over "
            "the pieces of a sentence, summed over blocks. The longer, the more there is to integrate.",
            _plot(_draw_arclength, report.sentences),
        ),
        (
            "Where in depth the solver takes its steps",
            "Each line is an accepted step, over the depth that it covers and at the height of its length, "
            "for some of the sentences. At whole numbers a block begins. Short steps are where the field "
            "bends.",
            _plot(_draw_steps, report.steps),
        ),
        (
            f"The paths of sentence {report.sentence}",
            _trajectory_words(report.trajectories),
            _plot(_draw_trajectories, report.trajectories),
        ),
    ]
    if report.points:
        sections.append(("Quality against cost", _curve_words(report), _plot(_draw_curve, report.points)))
    body = "\n".join(
        f"<h2>{html.escape(title)}</h2>\n" + (text if text[0] == "<" else f"<p>{text}</p>") + f"\n{plot}"
        for title, text, plot in sections
    )
    title = html.escape(report.title)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Depth: {title}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>Depth of {title}</h1>\n{body}\n</body>\n</html>\n"
    )


# Words


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _summary(report: Report) -> str:
    sentences = report.sentences
    items = [
        f"{len(sentences):,} sentences; {html.escape(report.setting)}.",
        "An evaluation of a vector field costs what a layer of a stock Transformer costs. "
        + " ".join(
            f"The {side} takes {statistics.fmean(values):.1f} of them per sentence ({_range(values)})."
            for side, values in _nfe(sentences).items()
        ),
        _adapts(sentences),
    ]
    unfinished = sum(each.unfinished > 0 for each in sentences)
    if unfinished:
        items.append(
            f"<b>{unfinished} sentences were cut short</b> by the budget, a vanishing step or a field "
            "that is not finite: there the tolerance did not decide. Raise --node-max-nfe or the tolerance."
        )
    items += map(html.escape, report.notes)
    return "<ul>\n" + "\n".join(f"<li>{item}</li>" for item in items) + "\n</ul>"


def _adapts(sentences: Sequence[Sentence]) -> str:
    values = sorted(each.nfe for each in sentences)
    low, high = values[len(values) // 20], values[-1 - len(values) // 20]
    if values[0] == values[-1]:
        return "<b>Every sentence takes the same number of them: at this tolerance, depth does not adapt.</b>"
    if low == high:
        return f"<b>Depth hardly adapts: nine sentences in ten take the same {low}, both sides together.</b>"
    return f"Depth adapts: nine sentences in ten take {low} to {high}, both sides together."


def _nfe(sentences: Sequence[Sentence]) -> Dict[str, List[int]]:
    return {side: [getattr(each, f"nfe_{side}") for each in sentences] for side in SIDES}


def _nfe_words(sentences: Sequence[Sentence]) -> str:
    rejected = statistics.fmean(each.rejected for each in sentences)
    return (
        "NFE, the number of function evaluations: everything is counted, the choice of the first step and "
        f"the steps that were rejected ({rejected:.2f} per sentence) too."
    )


def _axis(each: Sentence, side: str, what: str) -> float:
    if what == "loss":
        return each.loss
    return each.source_length if side == "encoder" else each.target_length


def _relation_words(sentences: Sequence[Sentence], what: str) -> str:
    words = {
        "length": "Evaluations against the length of the sentence: source for the encoder, target for the "
        "decoder.",
        "loss": "Evaluations against the model's loss on the reference, in bits per piece: is more spent "
        "where it is less sure?",
    }[what]
    for side in SIDES:
        r = correlation(
            [_axis(each, side, what) for each in sentences],
            [getattr(each, f"nfe_{side}") for each in sentences],
        )
        if r is None:
            words += f" The {side}'s evaluations do not vary."
        else:
            strength = "none to speak of" if abs(r) < 0.1 else "weak" if abs(r) < 0.3 else "clear"
            words += f" Correlation in the {side}: {r:+.2f} ({strength})."
    return words + " The line is the mean, a dot is a sentence."


def _trajectory_words(trajectories: Dict[str, Trajectories]) -> str:
    shares = ", ".join(f"{trajectories[side].explained:.0%} in the {side}" for side in SIDES)
    return (
        "Every piece is a point that moves through the model's space. Here is its way, from the ring to the "
        f"dot, in the plane that shows most of all movement ({shares} of the variance; PCA). Squares are "
        "where one block's weights give way to the next's. Straight and short paths are cheap."
    )


def _curve_words(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(each.label)}</td><td>{each.nfe:.1f}</td><td>{each.bleu:.2f}</td>"
        f"<td>{each.loss:.3f}</td></tr>"
        for each in report.points
    )
    return (
        f"<p>The same weights under other tolerances, on {report.bleu_sentences} sentences. One Euler step "
        "per block is a stock layer. NFE is that with the references as targets, loss in bits per piece, "
        f"BLEU sacrebleu's <code>{html.escape(report.points[0].signature)}</code>, pieces put together.</p>\n"
        f"<table><tr><th></th><th>NFE</th><th>BLEU</th><th>loss</th></tr>{rows}</table>"
    )


# Plots


def _plot(draw, *arguments) -> str:
    """What ``draw(figure, ...)`` draws, as SVG."""
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(9, 3.6), layout="constrained")
    draw(figure, *arguments)
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _draw_nfe(figure, sentences: Sequence[Sentence]) -> None:
    axes = figure.subplots(1, 2)
    for place, side in zip(axes, SIDES):
        counts = Counter(getattr(each, f"nfe_{side}") for each in sentences)
        place.bar(list(counts), list(counts.values()), color=COLOURS[side], width=0.8)
        place.set(xlabel=f"{side}: evaluations per sentence", ylabel="sentences")
        place.set(xlim=(min(counts) - 2, max(counts) + 2))
        place.xaxis.get_major_locator().set_params(integer=True)


def _draw_against(figure, sentences: Sequence[Sentence], what: str) -> None:
    axes = figure.subplots(1, 2)
    for place, side in zip(axes, SIDES):
        x = [_axis(each, side, what) for each in sentences]
        y = [getattr(each, f"nfe_{side}") for each in sentences]
        place.plot(x, y, ".", color=COLOURS[side], alpha=0.25, markersize=4)
        place.plot(*_means(x, y), "-", color="black", linewidth=1.2)
        unit = "bits per piece" if what == "loss" else "pieces"
        place.set(xlabel=f"{what}, {unit}", ylabel=f"{side}: evaluations")


def _means(x: Sequence[float], y: Sequence[float], bins: int = 12) -> Tuple[List[float], List[float]]:
    """Means of groups along x, of about the same size."""
    pairs = sorted(zip(x, y))
    edges = sorted({len(pairs) * number // bins for number in range(bins + 1)})
    groups = [pairs[a:b] for a, b in zip(edges, edges[1:])]
    return [statistics.fmean(p[0] for p in group) for group in groups], [
        statistics.fmean(p[1] for p in group) for group in groups
    ]


def _draw_arclength(figure, sentences: Sequence[Sentence]) -> None:
    first, second = figure.subplots(1, 2)
    for side in SIDES:
        values = [getattr(each, f"arclength_{side}") for each in sentences]
        first.hist(values, bins=30, color=COLOURS[side], alpha=0.7, label=side)
        second.plot(
            values,
            [getattr(each, f"nfe_{side}") for each in sentences],
            *(".",),
            **dict(color=COLOURS[side], alpha=0.25, markersize=4, label=side),
        )
    first.set(xlabel="arclength", ylabel="sentences")
    second.set(xlabel="arclength", ylabel="evaluations")
    first.legend(frameon=False)


def _draw_steps(figure, steps: Sequence[Step]) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    for place, side in zip(axes, SIDES):
        of_side = [each for each in steps if each.side == side]
        # Blocks one after another, whatever the length of their intervals.
        ends: Dict[int, float] = defaultdict(float)
        for each in of_side:
            ends[each.block] = max(ends[each.block], each.t + each.dt)
        place.hlines(
            [each.dt for each in of_side],
            [each.block - 1 + each.t / ends[each.block] for each in of_side],
            [each.block - 1 + (each.t + each.dt) / ends[each.block] for each in of_side],
            **dict(color=COLOURS[side], alpha=0.15, linewidth=1.5),
        )
        place.set(xlabel=f"{side}: depth, in blocks", ylabel="step size", ylim=(0, None))


def _draw_trajectories(figure, trajectories: Dict[str, Trajectories]) -> None:
    figure.set_size_inches(9, 4.6)
    axes = figure.subplots(1, 2)
    from matplotlib import colormaps

    for place, side in zip(axes, SIDES):
        of_side = trajectories[side]
        for number, path in enumerate(of_side.paths):
            colour = colormaps["turbo"](0.05 + 0.9 * number / max(len(of_side.paths) - 1, 1))
            x, y = zip(*path)
            place.plot(x, y, "-", color=colour, linewidth=1)
            place.plot(x[0], y[0], "o", color=colour, markersize=5, fillstyle="none")
            place.plot(x[-1], y[-1], "o", color=colour, markersize=4)
            for end in of_side.ends[1:-1]:
                place.plot(x[end], y[end], "s", color=colour, markersize=2.5)
            # As text, $ begins a formula.
            label = of_side.pieces[number].replace("\u2581", "_").replace("$", r"\$")
            place.annotate(label, (x[-1], y[-1]), fontsize=7, xytext=(3, 2), textcoords="offset points")
        place.set(title=side, xlabel="first component", ylabel="second component")


def _draw_curve(figure, points: Sequence[Point]) -> None:
    figure.set_size_inches(6, 3.6)
    axes = figure.subplots()
    curve = sorted((each for each in points if not each.label.startswith("euler")), key=lambda each: each.nfe)
    axes.plot([each.nfe for each in curve], [each.bleu for each in curve], "o-", color=COLOURS["encoder"])
    for each in points:
        if each not in curve:
            axes.plot(each.nfe, each.bleu, "s", color=COLOURS["decoder"])
        axes.annotate(
            each.label, (each.nfe, each.bleu), fontsize=8, xytext=(4, 4), textcoords="offset points"
        )
    axes.set(xlabel="evaluations per sentence, encoder and decoder", ylabel="BLEU")
