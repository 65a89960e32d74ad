"""Stiff problems: an explicit pair pays with small steps, or stops at its budget and says so."""

import pytest
import torch
import torchdiffeq

from fairseq_node.modules import solver
from fairseq_node.modules.runge_kutta import ADAPTIVE, ARRIVED, BUDGET_SPENT, STEP_UNDERFLOW
from fairseq_node.modules.solver import SolverConfig

double = torch.float64


def decay(t, y):
    """Towards cos t, at the rate 1000 (Prothero & Robinson 1974)."""
    t = t.view(-1, 1)
    return -1000 * (y - torch.cos(t)) - torch.sin(t)


def van_der_pol(t, y):
    """mu = 40, in a slow time in which one period is about 1.6 (Hairer & Wanner 1996, IV.1)."""
    return torch.stack([40 * y[:, 1], 40 * (40 * (1 - y[:, 0] ** 2) * y[:, 1] - y[:, 0])], dim=-1)


def robertson(t, y):
    """Robertson 1966: rates from 0.04 to 3e7."""
    a, b, c = y.unbind(-1)
    slow, fast, square = 0.04 * a, 1e4 * b * c, 3e7 * b * b
    return torch.stack([fast - slow, slow - fast - square, square], dim=-1)


PROBLEMS = [(decay, [1.0]), (van_der_pol, [2.0, 0.0]), (robertson, [1.0, 0.0, 0.0])]


@pytest.mark.parametrize("field,y0", PROBLEMS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("name", ["bosh3", "dopri5"])
def test_enough_evaluations_arrive_within_the_tolerance(name, field, y0):
    y0 = torch.tensor([y0], dtype=double)
    config = SolverConfig(solver=name, rtol=1e-4, atol=1e-7, max_nfe=1_000_000, time=0.3)
    solution = solver.solve(field, y0, config)
    expected = torchdiffeq.odeint(
        lambda t, y: field(t.view(1), y), y0, torch.tensor([0, 0.3], dtype=double), rtol=1e-9, atol=1e-11
    )[-1]
    assert solution.status[0] == ARRIVED and solution.rejected[0] > 0
    torch.testing.assert_close(solution.y, expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("control", solver.STEP_CONTROLS)
@pytest.mark.parametrize("field,y0", PROBLEMS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_spent_budget_ends_the_solve(name, field, y0, control):
    y0 = torch.tensor([y0])
    config = SolverConfig(solver=name, rtol=1e-5, atol=1e-8, max_nfe=60, step_control=control)
    solution = solver.solve(field, y0, config)
    # In float32 a tolerance of 1e-8 can also ask for steps that have no length.
    assert solution.status[0] in (BUDGET_SPENT, STEP_UNDERFLOW)
    assert solution.nfe[0] <= 60 and 0 <= solution.t[0] < 1
    assert torch.isfinite(solution.y).all()
