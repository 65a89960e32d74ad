"""Work against achieved error on DETEST: ours, torchdiffeq's and torchode's solvers with the same pair.

``python tests/modules/test_detest.py`` prints the comparison.
"""

import functools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchdiffeq

from fairseq_node.modules.runge_kutta import ADAPTIVE, TABLEAUS, adaptive

sys.path.insert(0, str(Path(__file__).parent))
import detest  # noqa: E402

double = torch.float64
TOLERANCES = {"heun_euler": (1e-1, 1e-2), "bosh3": (1e-3, 1e-4), "dopri5": (1e-3, 1e-5)}
THEIRS = {"heun_euler": "adaptive_heun", "bosh3": "bosh3", "dopri5": "dopri5"}


class Counted:
    """A field that counts its evaluations, and takes torchdiffeq's scalar time too."""

    def __init__(self, field):
        self.field, self.calls = field, 0

    def __call__(self, t, y):
        self.calls += 1
        return self.field(t.expand(len(y)), y)


def start(name):
    field, y0 = detest.PROBLEMS[name]
    return Counted(field), torch.tensor([y0], dtype=double)


def ours(name, pair, tolerance):
    field, y0 = start(name)
    solution = adaptive(field, y0, detest.END, TABLEAUS[pair], rtol=tolerance, atol=tolerance)
    assert solution.status[0] == 0 and solution.nfe[0] == field.calls
    return solution.y, field.calls


def by_torchdiffeq(name, method, tolerance):
    field, y0 = start(name)
    t = torch.tensor([0.0, detest.END], dtype=double)
    return torchdiffeq.odeint(field, y0, t, method=method, rtol=tolerance, atol=tolerance)[-1], field.calls


def by_torchode(name, pair, tolerance):
    torchode = pytest.importorskip("torchode")
    step = {"heun_euler": torchode.Heun, "dopri5": torchode.Dopri5}[pair]
    field, y0 = start(name)
    term = torchode.ODETerm(field)
    controller = torchode.IntegralController(atol=tolerance, rtol=tolerance, term=term)
    zero = torch.zeros(1, dtype=double)
    problem = torchode.InitialValueProblem(
        y0=y0, t_start=zero, t_end=zero + detest.END, t_eval=torch.tensor([[0.0, detest.END]], dtype=double)
    )
    solution = torchode.AutoDiffAdjoint(step(term=term), controller).solve(problem)
    return solution.ys[:, -1], field.calls


@functools.cache
def reference(name):
    """Up to the end and no further: torchdiffeq's interpolation from beyond it is off by up to 2e-6."""
    field, y0 = start(name)
    t = torch.tensor([0.0, detest.END], dtype=double)
    options = {"step_t": t[1:]}
    return torchdiffeq.odeint(field, y0, t, method="dopri8", rtol=1e-12, atol=1e-12, options=options)[-1]


@functools.cache
def curve(solve, name, pair):
    """log10 of errors and of evaluations, from the loosest tolerance to the tightest."""
    points = []
    for tolerance in TOLERANCES[pair]:
        y, calls = solve(name, pair if solve is not by_torchdiffeq else THEIRS[pair], tolerance)
        error = float((y - reference(name)).square().mean().sqrt())
        points.append((math.log10(max(error, 1e-13)), math.log10(calls)))
    return points


def work_at_equal_error(one, other):
    """log10 of the ratio of evaluations, in the middle of the errors that both have reached; None if
    there are none."""
    low = max(min(error for error, _ in points) for points in (one, other))
    high = min(max(error for error, _ in points) for points in (one, other))
    if low > high:
        return None
    middle = (low + high) / 2
    works = [np.interp(middle, *zip(*sorted(points))) for points in (one, other)]
    return works[0] - works[1]


def compare(pair, theirs):
    """Our evaluations in units of theirs, geometric mean over the problems, and how many these were."""
    ratios = []
    for name in detest.PROBLEMS:
        ratio = work_at_equal_error(curve(ours, name, pair), curve(theirs, name, pair))
        if ratio is not None:
            ratios.append(ratio)
    return 10 ** float(np.mean(ratios)), len(ratios)


@pytest.mark.parametrize(
    "pair,theirs",
    [
        ("bosh3", by_torchdiffeq),
        ("dopri5", by_torchdiffeq),
        ("dopri5", by_torchode),
        ("heun_euler", by_torchode),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_work_against_error_is_at_least_as_good(pair, theirs):
    """A twentieth of slack: where a problem's error is erratic, so is the ratio.

    torchdiffeq's adaptive_heun is another method: it takes the derivative at the predicted state of a
    step for that at the next step's start (as a PEC scheme does), and so needs one evaluation a step
    where the pair needs two.
    """
    ratio, problems = compare(pair, theirs)
    assert problems >= len(detest.PROBLEMS) - 4
    assert ratio <= 1.05


@pytest.mark.parametrize("pair", ADAPTIVE)
def test_errors_follow_the_tolerance(pair):
    first, last = zip(*([error for error, _ in curve(ours, name, pair)] for name in detest.PROBLEMS))
    # Problems such as D5 multiply errors along the way.
    assert max(last) <= math.log10(TOLERANCES[pair][-1]) + 4
    decades = math.log10(TOLERANCES[pair][0] / TOLERANCES[pair][-1])
    assert np.mean(first) - np.mean(last) > 0.5 * decades


if __name__ == "__main__":
    print("evaluations at equal error, ours in units of theirs (geometric mean over the problems)")
    for chosen in ADAPTIVE:
        for other in (by_torchdiffeq, by_torchode):
            if chosen != "bosh3" or other is by_torchdiffeq:
                ratio, problems = compare(chosen, other)
                print(f"{chosen:10} {other.__name__[3:]:12} {ratio:.3f} ({problems} problems)", flush=True)
