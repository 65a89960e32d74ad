"""Options of a solve, and the one step size for the whole batch."""

import sys
from pathlib import Path

import pytest
import torch

from fairseq_node.modules import batch_control, solver
from fairseq_node.modules.runge_kutta import ADAPTIVE
from fairseq_node.modules.solver import InvalidOption, SolverConfig

sys.path.insert(0, str(Path(__file__).parent))
from problems import Linear  # noqa: E402

double = torch.float64


@pytest.mark.parametrize(
    "name,options",
    [
        ("solver", dict(solver="rk45")),
        ("steps", dict(solver="rk4", steps=0)),
        ("rtol", dict(rtol=-1.0)),
        ("atol", dict(atol=-1.0)),
        ("rtol", dict(rtol=float("nan"))),
        ("rtol", dict(rtol=0.0, atol=0.0)),
        ("time", dict(time=0.0)),
        ("max_nfe", dict(solver="dopri5", max_nfe=8)),
        ("step_control", dict(step_control="token")),
        ("gradient", dict(gradient="adjoint")),
        ("gradient", dict(gradient="adjoint", step_control="batch", solver="rk4")),
        ("on_failure", dict(on_failure="ignore")),
    ],
)
def test_bad_options_are_named(name, options):
    with pytest.raises(InvalidOption) as caught:
        SolverConfig(**options)
    assert caught.value.name == name and "use" in str(caught.value)


class Field(Linear):
    def tensors(self):
        return (self.rate,)

    def select(self, rows):
        return Field(self.rate[rows])


def config(**options):
    return SolverConfig(**{**dict(step_control="batch", max_nfe=1000), **options})


def run(gradient, name="dopri5", tolerance=1e-8, integrand=None):
    rate = torch.tensor([[0.5], [5.0]], dtype=double, requires_grad=True)
    y0 = torch.ones(2, 3, dtype=double, requires_grad=True)
    settings = config(solver=name, gradient=gradient, rtol=tolerance, atol=tolerance, max_nfe=100_000)
    solution = solver.solve(Field(rate), y0, settings, integrand=integrand)
    loss = solution.y.square().sum()
    if integrand is not None:
        loss = loss + solution.integral.sum()
    gradients = torch.autograd.grad(loss, (rate, y0))
    return solution, gradients


@pytest.mark.parametrize("name", ADAPTIVE)
def test_batch_control_gives_every_row_the_same_steps(name):
    solution, _ = run("backprop", name, 1e-5)
    exact = torch.exp(-torch.tensor([[0.5], [5.0]], dtype=double)).expand(2, 3)
    torch.testing.assert_close(solution.y, exact, rtol=0, atol=5e-4)
    for counts in (solution.nfe, solution.accepted, solution.rejected):
        assert counts[0] == counts[1]


@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_batch_control_ends_at_the_end(name, tolerance):
    """A step beyond it, interpolated back, was up to 15 times the tolerance off."""
    rate = torch.tensor([[0.5], [2.0]], dtype=double)
    settings = config(solver=name, rtol=tolerance, atol=tolerance)
    times = []

    class Watched(Field):
        def __call__(self, t, y):
            times.append(float(t.max()))
            return super().__call__(t, y)

    solution = solver.solve(Watched(rate), torch.ones(2, 3, dtype=double), settings)
    assert max(times) == pytest.approx(1.0)
    torch.testing.assert_close(solution.y, torch.exp(-rate).expand(2, 3), rtol=0, atol=3 * tolerance)


def test_every_gradient_mode_agrees_and_counts_backward():
    integrand = torch.sin
    _, reference = run("backprop", integrand=integrand)
    for gradient, tolerance in (("checkpoint", 1e-13), ("adjoint", 1e-5)):
        solution, gradients = run(gradient, integrand=integrand)
        for ours, expected in zip(gradients, reference):
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
        if gradient == "adjoint":
            assert (solution.nfe_backward > 0).all()


def test_adjoint_converges_to_backprop_as_the_tolerance_falls():
    _, reference = run("backprop", tolerance=1e-10)
    for tolerance in (1e-2, 1e-4, 1e-6, 1e-8):
        for ours, expected in zip(run("adjoint", tolerance=tolerance)[1], reference):
            torch.testing.assert_close(ours, expected, rtol=0, atol=3 * tolerance)


@pytest.mark.parametrize("gradient", ["backprop", "adjoint"])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_failures_finish_with_finite_states_and_gradients(name, gradient):
    rate = torch.tensor([[3000.0], [1.0]], dtype=double, requires_grad=True)
    y0 = torch.ones(2, 3, dtype=double)
    spent = solver.solve(
        Field(rate), y0, config(solver=name, gradient=gradient, max_nfe=40), integrand=torch.sin
    )
    assert (spent.status == solver.BUDGET_SPENT).all() and (spent.nfe <= 40).all()
    assert (spent.t < 1).all() and torch.isfinite(spent.y).all()
    spent.y.sum().backward()
    assert torch.isfinite(rate.grad).all()


def test_a_field_that_is_not_finite_is_reported():
    def field(t, y):
        return y / (t - t).unsqueeze(-1)

    field.tensors = lambda: ()
    solution = solver.solve(field, torch.ones(2, 3), config())
    assert (solution.status == solver.NOT_FINITE).all()
    assert torch.equal(solution.y, torch.ones(2, 3))


def test_padding_is_not_part_of_the_batch_norm():
    y0 = torch.randn(2, 4, 3, dtype=double, generator=torch.Generator().manual_seed(0))
    valid = torch.tensor([[True] * 4, [True, True, False, False]])

    def field(t, y):
        return torch.sin(3 * y)

    settings = config(rtol=1e-4, atol=1e-4)
    one = solver.solve(field, y0, settings, valid=valid)
    y0[1, 2:] = 1e6
    other = solver.solve(field, y0, settings, valid=valid)
    assert torch.equal(one.nfe, other.nfe)
    torch.testing.assert_close(one.y[valid], other.y[valid], rtol=0, atol=0)


def test_time_is_in_the_state_dtype():
    """Some devices have no float64."""
    seen = set()

    def field(t, y):
        seen.add(t.dtype)
        return -y

    batch_control.solve(field, torch.ones(1, 2), config())
    assert seen == {torch.float32}
