"""Arclength and kinetic energy against closed forms."""

import math

import pytest
import torch

from fairseq_node.modules.path import PathConfig
from fairseq_node.modules.runge_kutta import FIXED, TABLEAUS, adaptive, fixed_grid

double = torch.float64
TOKEN = PathConfig()


def lengths(field, y0, config=TOKEN, valid=None, name="dopri5", time=1.0):
    if name in FIXED:
        solution = fixed_grid(field, y0, time, TABLEAUS[name], 20, integrand=config.integrand)
    else:
        solution = adaptive(
            field, y0, time, TABLEAUS[name], rtol=1e-9, atol=1e-9, valid=valid, integrand=config.integrand
        )
    return solution.y, config.mean(solution.integral, valid)


@pytest.mark.parametrize("name", list(TABLEAUS))
def test_straight_line(name):
    """A constant field: arclength is the distance, and arclength² = T x kinetic energy."""
    velocity = torch.tensor([3.0, 4.0], dtype=double)
    y0 = torch.randn(2, 3, 2, dtype=double)
    y, mean = lengths(lambda t, y: velocity.expand_as(y), y0, name=name, time=2.0)
    torch.testing.assert_close(mean[:, 0], torch.full((2,), 10.0, dtype=double))
    torch.testing.assert_close(mean[:, 0] ** 2, 2.0 * mean[:, 1])
    torch.testing.assert_close((y - y0).norm(dim=-1), torch.full((2, 3), 10.0, dtype=double))


def test_logarithmic_spiral():
    """y' = A y with A = [[-1, -5], [5, -1]]: speed sqrt(26) r(t), r = r0 exp(-t)."""
    a = torch.tensor([[-1.0, -5.0], [5.0, -1.0]], dtype=double)
    y0 = torch.tensor([[[1.0, 0.0]], [[0.0, 3.0]]], dtype=double)
    _, mean = lengths(lambda t, y: y @ a.T, y0)
    radius = torch.tensor([1.0, 3.0], dtype=double)
    torch.testing.assert_close(mean[:, 0], math.sqrt(26) * radius * (1 - math.exp(-1)), rtol=1e-6, atol=0)
    torch.testing.assert_close(mean[:, 1], 26 * radius**2 * (1 - math.exp(-2)) / 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm", ["token", "sentence"])
def test_padding_and_inequalities(norm):
    config = PathConfig(norm=norm)
    valid = torch.tensor([[True] * 4, [True, True, False, False]])

    def field(t, y):
        return torch.sin(3 * y) + y.roll(1, -1)

    def masked(t, y):
        return field(t, y).masked_fill(~valid[: len(y)].unsqueeze(-1), 0.0)

    y0 = torch.randn(2, 4, 3, dtype=double, generator=torch.Generator().manual_seed(1))
    solution = fixed_grid(masked, y0, 1.0, TABLEAUS["rk4"], 20, integrand=config.integrand)
    mean = config.mean(solution.integral, valid)
    _, alone = lengths(field, y0[1:, :2], config, name="rk4")
    torch.testing.assert_close(mean[1], alone[0])
    length, energy = solution.integral.unbind(-1)
    distance = (
        (solution.y - y0).norm(dim=-1)
        if norm == "token"
        else (solution.y - y0).flatten(1).norm(dim=-1, keepdim=True)
    )
    assert (length >= distance - 1e-9).all()
    assert (length**2 <= energy + 1e-9).all()


def test_gradient_at_rest_is_finite():
    for norm in ("token", "sentence"):
        derivative = torch.zeros(2, 3, 4, requires_grad=True)
        PathConfig(norm=norm, gradient=True).integrand(derivative).sum().backward()
        assert torch.equal(derivative.grad, torch.zeros_like(derivative))


def test_statistics_add_nothing_to_the_graph():
    derivative = torch.ones(2, 3, 4, requires_grad=True)
    assert not PathConfig(gradient=False).integrand(derivative).requires_grad
