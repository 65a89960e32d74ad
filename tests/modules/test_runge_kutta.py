"""The per-sentence solver on problems with known solutions, and against torchdiffeq and torchode."""

import doctest
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_node.modules import runge_kutta
from fairseq_node.modules.runge_kutta import (
    ADAPTIVE,
    ARRIVED,
    BUDGET_SPENT,
    FIXED,
    NOT_FINITE,
    STEP_UNDERFLOW,
    TABLEAUS,
    adaptive,
    fixed_grid,
)

sys.path.insert(0, str(Path(__file__).parent))
from problems import Circle, Forced, Linear  # noqa: E402

double = torch.float64


def linear(*rates):
    return Linear(torch.tensor(rates, dtype=double).unsqueeze(-1))


def ones(batch, dim=3):
    return torch.ones(batch, dim, dtype=double)


def test_doctest():
    assert doctest.testmod(runge_kutta).failed == 0


@pytest.mark.parametrize("name", list(TABLEAUS))
def test_tableaus_are_consistent(name):
    tableau = TABLEAUS[name]
    assert sum(tableau.b) == pytest.approx(1)
    for c, row in zip(tableau.c, tableau.a):
        assert sum(row) == pytest.approx(c)
    if tableau.error is not None:
        assert sum(tableau.error) == pytest.approx(0)
    if tableau.fsal:
        assert tableau.a[-1] == tableau.b[:-1] and tableau.b[-1] == 0 and tableau.c[-1] == 1


@pytest.mark.parametrize(
    "problem", [linear(1.0, 2.0), Forced(torch.tensor([[3.0], [5.0]]).double()), Circle()]
)
@pytest.mark.parametrize("name", FIXED)
def test_fixed_grids_have_their_textbook_order(name, problem):
    y0 = torch.tensor([[1.0, 0.5], [-0.3, 2.0]], dtype=double)
    errors = []
    for steps in (32, 64):
        solution = fixed_grid(problem, y0, 1.0, TABLEAUS[name], steps)
        assert solution.nfe.tolist() == [steps * TABLEAUS[name].stages] * 2
        errors.append((solution.y - problem.exact(1.0, y0)).norm())
    assert torch.log2(errors[0] / errors[1]) == pytest.approx(TABLEAUS[name].order, abs=0.25)


def test_a_grid_notes_where_a_row_ceases_to_be_finite():
    def field(t, y):
        return torch.where(t.unsqueeze(1) >= 0.5 * torch.arange(1, 3).unsqueeze(1), float("inf"), y)

    solution = fixed_grid(field, ones(2), 1.0, TABLEAUS["euler"], 4, check=True)
    assert solution.status.tolist() == [NOT_FINITE, ARRIVED]
    assert solution.t.tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    "problem", [linear(1.0, 30.0), Forced(torch.tensor([[3.0], [40.0]]).double()), Circle()]
)
@pytest.mark.parametrize("name", ADAPTIVE)
def test_error_falls_with_the_tolerance(name, problem):
    y0 = torch.tensor([[1.0, 0.5], [-0.3, 2.0]], dtype=double)
    errors, costs = [], []
    for tolerance in (1e-3, 1e-5, 1e-7):
        solution = adaptive(problem, y0, 1.0, TABLEAUS[name], rtol=tolerance, atol=tolerance)
        errors.append(float((solution.y - problem.exact(1.0, y0)).abs().max()))
        costs.append(int(solution.nfe.sum()))
        # Local errors are held to the tolerance; the global one may be some steps' worth of it.
        assert errors[-1] < 50 * tolerance
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    assert costs == sorted(costs)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_row_does_not_see_its_neighbours(name):
    field, y0 = linear(0.1, 5.0, 70.0, 1.0), ones(4)
    together = adaptive(field, y0, 1.0, TABLEAUS[name], rtol=1e-4, atol=1e-4)
    for row in range(4):
        rows = torch.tensor([row])
        alone = adaptive(field.select(rows), y0[rows], 1.0, TABLEAUS[name], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alone.y, together.y[rows], rtol=0, atol=1e-14)
        assert alone.nfe.item() == together.nfe[row].item()
        assert alone.rejected.item() == together.rejected[row].item()


@pytest.mark.parametrize("name", ADAPTIVE)
def test_cost_follows_the_sum_of_the_rows(name):
    """Rows that have arrived are not evaluated any more: counted by the field itself."""

    class Counting(Linear):
        evaluated = 0

        def __call__(self, t, y):
            Counting.evaluated += len(y)
            return super().__call__(t, y)

        def select(self, rows):
            return Counting(self.rate[rows])

    field = Counting(torch.tensor([[0.1], [200.0], [3.0]], dtype=double))
    solution = adaptive(field, ones(3), 1.0, TABLEAUS[name], rtol=1e-5, atol=1e-5)
    assert solution.nfe.max() > 2 * solution.nfe.min()
    # A trial step of all rows is one evaluation for each of them, whether they accept it or not.
    assert Counting.evaluated == int(solution.nfe.sum())


@pytest.mark.parametrize("name", ADAPTIVE)
def test_padding_is_not_part_of_the_norm(name):
    y0 = torch.randn(2, 4, 3, dtype=double, generator=torch.Generator().manual_seed(0))
    valid = torch.tensor([[True] * 4, [True, True, False, False]])

    def field(t, y):
        return torch.sin(3 * y)

    plain = adaptive(field, y0[1:, :2], 1.0, TABLEAUS[name], rtol=1e-4, atol=1e-4)
    y0[1, 2:] = 1e30
    padded = adaptive(field, y0, 1.0, TABLEAUS[name], rtol=1e-4, atol=1e-4, valid=valid)
    assert padded.nfe[1] == plain.nfe[0]
    torch.testing.assert_close(padded.y[1:, :2], plain.y, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_dense_output(name):
    field, y0 = Forced(torch.tensor([[3.0], [20.0]]).double()), ones(2)
    solution = adaptive(field, y0, 1.0, TABLEAUS[name], rtol=1e-6, atol=1e-6, dense=True)
    assert torch.equal(solution.dense(0.0), y0)
    torch.testing.assert_close(solution.dense(1.0), solution.y)
    for t in (0.1, 0.35, 0.71, 0.99):
        assert (solution.dense(t) - field.exact(t, y0)).abs().max() < 1e-4
    each = solution.dense(torch.tensor([0.3, 0.6], dtype=double))
    torch.testing.assert_close(each[0], solution.dense(0.3)[0])
    torch.testing.assert_close(each[1], solution.dense(0.6)[1])


@pytest.mark.parametrize(
    "name,theirs", [("dopri5", "dopri5"), ("bosh3", "bosh3"), ("heun_euler", "adaptive_heun")]
)
def test_agrees_with_torchdiffeq(name, theirs):
    torchdiffeq = pytest.importorskip("torchdiffeq")
    tolerance = 1e-9 if name == "dopri5" else 1e-6

    def field(t, y):
        return torch.sin(2 * y) + torch.cos(y.roll(1, -1))

    y0 = torch.linspace(-2, 2, 5, dtype=double).unsqueeze(0)
    ours = adaptive(field, y0, 1.0, TABLEAUS[name], rtol=tolerance, atol=tolerance)
    other = torchdiffeq.odeint(
        field, y0, torch.tensor([0.0, 1.0], dtype=double), rtol=1e-11, atol=1e-11, method="dopri5"
    )[-1]
    assert (ours.y - other).abs().max() < 30 * tolerance


def test_agrees_with_torchode_row_by_row():
    torchode = pytest.importorskip("torchode")
    rates = torch.tensor([[0.5], [5.0], [50.0]], dtype=double)

    def field(t, y):
        return -rates * y + torch.sin(5 * t).unsqueeze(-1)

    class Ours:
        def __init__(self, rates):
            self.rates = rates

        def __call__(self, t, y):
            return -self.rates * y + torch.sin(5 * t).unsqueeze(-1)

        def select(self, rows):
            return Ours(self.rates[rows])

    y0 = ones(3, 2)
    ours = adaptive(Ours(rates), y0, 1.0, TABLEAUS["dopri5"], rtol=1e-7, atol=1e-7)
    term = torchode.ODETerm(field)
    solver = torchode.AutoDiffAdjoint(
        torchode.Dopri5(term=term), torchode.IntegralController(atol=1e-7, rtol=1e-7, term=term)
    )
    problem = torchode.InitialValueProblem(
        y0=y0, t_start=torch.zeros(3).double(), t_end=torch.ones(3).double()
    )
    theirs = solver.solve(problem)
    torch.testing.assert_close(ours.y, theirs.ys[:, -1], rtol=0, atol=2e-6)
    # Both adapt per row; the controllers differ (PI against I), so the counts do a little.
    ratio = ours.accepted / theirs.stats["n_accepted"]
    assert ((0.7 < ratio) & (ratio < 1.4)).all(), (ours.accepted, theirs.stats["n_accepted"])


@pytest.mark.parametrize("name", [*FIXED, *ADAPTIVE])
def test_gradients_in_float64(name):
    def run(rate, y0):
        field = Linear(rate)
        if name in FIXED:
            return fixed_grid(field, y0, 1.0, TABLEAUS[name], 3, integrand=lambda k: k.square().sum(-1))
        return adaptive(
            field, y0, 1.0, TABLEAUS[name], rtol=1e-2, atol=1e-2, integrand=lambda k: k.square().sum(-1)
        )

    def outputs(rate, y0):
        solution = run(rate, y0)
        return solution.y, solution.integral

    rate = torch.tensor([[0.5], [1.5]], dtype=double, requires_grad=True)
    y0 = ones(2, 2).requires_grad_()
    if name in FIXED:  # an adaptive solve chooses other steps for other inputs
        assert torch.autograd.gradcheck(outputs, (rate, y0))
    else:
        solution = adaptive(
            Linear(rate),
            y0,
            1.0,
            TABLEAUS[name],
            rtol=1e-6,
            atol=1e-6,
            integrand=lambda k: k.square().sum(-1),
        )
        (gradient,) = torch.autograd.grad(solution.y.sum(), rate)
        exact = torch.autograd.grad(Linear(rate).exact(1.0, y0).sum(), rate)[0]
        torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*FIXED, *ADAPTIVE])
def test_checkpoint_gives_the_gradient_of_backprop_and_counts_its_replays(name):
    results = []
    for checkpoint in (False, True):
        rate = torch.tensor([[0.5], [40.0]], dtype=double, requires_grad=True)
        y0 = ones(2).requires_grad_()
        options = dict(checkpoint=checkpoint, integrand=lambda k: torch.linalg.vector_norm(k, dim=-1))
        if name in FIXED:
            solution = fixed_grid(Linear(rate), y0, 1.0, TABLEAUS[name], 5, **options)
        else:
            solution = adaptive(Linear(rate), y0, 1.0, TABLEAUS[name], rtol=1e-3, atol=1e-3, **options)
        (solution.y.square().sum() + solution.integral.sum()).backward()
        results.append((rate.grad, y0.grad))
        assert bool((solution.nfe_backward > 0).all()) == checkpoint
    for stored, replayed in zip(*results):
        torch.testing.assert_close(stored, replayed, rtol=1e-13, atol=1e-13)


def test_quadrature_of_a_circle_is_its_circumference():
    y0 = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=double)
    solution = adaptive(
        Circle(),
        y0,
        1.0,
        TABLEAUS["dopri5"],
        rtol=1e-9,
        atol=1e-9,
        integrand=lambda k: torch.linalg.vector_norm(k, dim=-1),
    )
    torch.testing.assert_close(
        solution.integral, 2 * torch.pi * torch.tensor([1.0, 2.0], dtype=double), rtol=1e-7, atol=0
    )


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_spent_budget_is_never_exceeded_and_finishes(name):
    field = linear(1.0, 3000.0)
    solution = adaptive(field, ones(2), 1.0, TABLEAUS[name], rtol=1e-3, atol=1e-3, max_nfe=60)
    assert solution.status.tolist() == [ARRIVED, BUDGET_SPENT]
    assert solution.nfe.max() <= 60
    assert solution.t[0] == 1 and 0 < solution.t[1] < 1
    assert torch.isfinite(solution.y).all()


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_step_that_underflows_stops(name):
    def field(t, y):  # noise: no step is small enough
        return torch.randn_like(y)

    solution = adaptive(field, torch.ones(2, 3), 1.0, TABLEAUS[name], rtol=0.0, atol=1e-12, max_nfe=100_000)
    assert solution.status.tolist() == [STEP_UNDERFLOW] * 2


class Wall:
    """Finite before its wall; beyond it not."""

    def __init__(self, rate, wall):
        self.rate, self.wall = rate, wall

    def __call__(self, t, y):
        beyond = (t > self.wall).unsqueeze(-1)
        return -self.rate * y * torch.where(beyond, float("inf"), 1.0)

    def select(self, rows):
        return Wall(self.rate[rows], self.wall[rows])


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_field_that_is_not_finite_spoils_nobody(name, checkpoint):
    """Neither the other rows nor, in backward, the shared parameters (0 x inf is NaN)."""
    rate = torch.tensor([[1.0], [2.0], [3.0]], dtype=double, requires_grad=True)
    walls = torch.tensor([2.0, 0.5, -1.0], dtype=double)
    solution = adaptive(
        Wall(rate, walls),
        ones(3),
        1.0,
        TABLEAUS[name],
        rtol=1e-3,
        atol=1e-3,
        max_nfe=400,
        checkpoint=checkpoint,
    )
    assert solution.status[0] == ARRIVED and solution.status[2] == NOT_FINITE
    assert solution.status[1] in (NOT_FINITE, STEP_UNDERFLOW, BUDGET_SPENT)
    assert solution.t[1] == pytest.approx(0.5, abs=1e-3)
    assert torch.isfinite(solution.y).all()
    solution.y.sum().backward()
    assert torch.isfinite(rate.grad).all()
    assert rate.grad[0] != 0 and rate.grad[2] == 0


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_a_stage_that_the_error_estimate_ignores_is_not_ignored(checkpoint, dense):
    """dopri5 gives its second stage no weight in the error, and a field that saturates makes a finite
    derivative of an infinite state: the infinity would reach the shared parameters as 0 x inf only."""
    weight = torch.ones(3, 3, dtype=double, requires_grad=True)
    shock = torch.tensor([[0.0], [1.0]], dtype=double)

    class Shock:
        def __init__(self, shock):
            self.shock, self.calls = shock, 0

        def __call__(self, t, y):
            here = (0.0 < t) & (t < 0.25)  # the second stage of a step over all of the interval
            infinite = torch.where((here.unsqueeze(-1) & (self.shock > 0)), float("inf"), 0.0)
            return 1e-3 * torch.tanh(y @ weight) + infinite

        def select(self, rows):
            return Shock(self.shock[rows])

    solution = adaptive(
        Shock(shock),
        torch.ones(2, 3, dtype=double),
        1.0,
        TABLEAUS["dopri5"],
        rtol=1e-3,
        atol=1e-3,
        max_nfe=200,
        checkpoint=checkpoint,
        dense=dense,
    )
    assert solution.status[0] == ARRIVED and solution.status[1] != ARRIVED
    assert torch.isfinite(solution.y).all()
    solution.y.sum().backward()
    assert torch.isfinite(weight.grad).all() and (weight.grad != 0).all()


@pytest.mark.parametrize("name", ADAPTIVE)
def test_rows_without_entries_and_empty_batches(name):
    valid = torch.tensor([[True, True], [False, False]])
    y0 = torch.ones(2, 2, 3)
    solution = adaptive(
        lambda t, y: torch.where(y > 0, -y, 0.0), y0, 1.0, TABLEAUS[name], rtol=1e-2, atol=1e-2, valid=valid
    )
    assert solution.status.tolist() == [ARRIVED, ARRIVED]
    assert solution.accepted[1] == 1
    for shape in ((0, 3), (2, 0, 3)):
        empty = adaptive(lambda t, y: -y, torch.ones(shape), 1.0, TABLEAUS[name], rtol=1e-2, atol=1e-2)
        assert empty.y.shape == shape and empty.nfe.sum() == 0


def test_zero_tolerances():
    """rtol = 0 and atol = 0 are legal one at a time, with entries that are zero too."""
    y0 = torch.tensor([[0.0, 1.0]], dtype=double)
    for rtol, atol in ((0.0, 1e-6), (1e-6, 0.0)):
        solution = adaptive(linear(1.0), y0, 1.0, TABLEAUS["dopri5"], rtol=rtol, atol=atol)
        assert solution.status.item() == ARRIVED
        torch.testing.assert_close(solution.y, linear(1.0).exact(1.0, y0), rtol=1e-5, atol=1e-5)


def test_float32_time_and_state_stay_float32():
    seen = set()

    def field(t, y):
        seen.update((t.dtype, y.dtype))
        return -y

    solution = adaptive(field, torch.ones(2, 3), 1.0, TABLEAUS["dopri5"], rtol=1e-3, atol=1e-3)
    assert seen == {torch.float32} and solution.y.dtype == torch.float32


@settings(max_examples=40, deadline=None)
@given(
    rates=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    exponent=st.floats(-6, -1),
    name=st.sampled_from(ADAPTIVE),
)
def test_any_linear_problem_arrives_within_its_tolerance(rates, exponent, name):
    tolerance = 10**exponent
    field, y0 = linear(*rates), ones(len(rates))
    solution = adaptive(field, y0, 1.0, TABLEAUS[name], rtol=tolerance, atol=tolerance)
    assert (solution.status == ARRIVED).all()
    assert (solution.y - field.exact(1.0, y0)).abs().max() < 20 * tolerance
    stages = TABLEAUS[name].stages
    per_step = solution.accepted + solution.rejected
    if TABLEAUS[name].fsal:
        assert torch.equal(solution.nfe, 2 + (stages - 1) * per_step)
    else:
        assert torch.equal(solution.nfe, 1 + stages * solution.accepted + (stages - 1) * solution.rejected)
