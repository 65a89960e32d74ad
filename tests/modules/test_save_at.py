"""The states between the ends of a solve, for both step controls."""

import sys
from pathlib import Path

import pytest
import torch

from fairseq_node.modules import solver
from fairseq_node.modules.runge_kutta import ADAPTIVE
from fairseq_node.modules.solver import SolverConfig

sys.path.insert(0, str(Path(__file__).parent))
from problems import Forced, Linear  # noqa: E402

double = torch.float64
TIMES = torch.tensor([0.0, 0.2, 0.5, 0.9, 1.0], dtype=double)


@pytest.mark.parametrize("control", solver.STEP_CONTROLS)
@pytest.mark.parametrize("name", ADAPTIVE)
def test_saved_states_are_on_the_solution(control, name):
    field = Forced(torch.tensor([[1.0], [9.0]], dtype=double))
    y0 = torch.ones(2, 3, dtype=double)
    config = SolverConfig(solver=name, rtol=1e-6, atol=1e-6, max_nfe=100_000, step_control=control)
    plain = solver.solve(field, y0, config)
    for times in (TIMES, TIMES[1:-1]):
        solution = solver.solve(field, y0, config, save_at=times)
        assert solution.saved.shape == (len(times), 2, 3)
        for t, state in zip(times, solution.saved):
            torch.testing.assert_close(state, field.exact(float(t), y0), rtol=0, atol=1e-3)
        assert torch.equal(solution.nfe, plain.nfe)
        torch.testing.assert_close(solution.y, plain.y, rtol=0, atol=1e-6)
    assert torch.equal(solver.solve(field, y0, config, save_at=TIMES).saved[0], y0)


@pytest.mark.parametrize("control", solver.STEP_CONTROLS)
def test_a_solve_that_was_cut_short_saves_its_last_line(control):
    field, y0 = Linear(torch.tensor([[500.0], [500.0]], dtype=double)), torch.ones(2, 3, dtype=double)
    config = SolverConfig(rtol=1e-6, atol=1e-6, max_nfe=60, step_control=control)
    solution = solver.solve(field, y0, config, save_at=TIMES)
    assert (solution.status == solver.BUDGET_SPENT).all() and (solution.t < 0.2).all()
    torch.testing.assert_close(solution.saved[-1], solution.y)
    slopes = solution.saved.diff(dim=0)[1:] / TIMES.diff()[1:].view(-1, 1, 1)
    torch.testing.assert_close(slopes, slopes[:1].expand_as(slopes), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("control", solver.STEP_CONTROLS)
def test_rows_that_are_not_finite_or_not_there(control):
    config = SolverConfig(step_control=control)
    y0 = torch.ones(2, 3)
    stuck = solver.solve(lambda t, y: y * float("nan"), y0, config, save_at=TIMES.float())
    assert torch.equal(stuck.saved, y0.expand(5, 2, 3))
    none = solver.solve(lambda t, y: -y, y0[:0], config, save_at=TIMES.float())
    assert none.saved.shape == (5, 0, 3)
