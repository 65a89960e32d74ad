"""Arclength and kinetic energy against closed forms."""

import math

import pytest
import torch
import torchdiffeq

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


def test_circle():
    """y' = A y with A a rotation: speed radius x rate, and a full turn ends where it started."""
    a = torch.tensor([[0.0, -math.pi], [math.pi, 0.0]], dtype=double)
    y0 = torch.tensor([[[1.0, 0.0]], [[0.0, 3.0]]], dtype=double)
    y, mean = lengths(lambda t, y: y @ a.T, y0, time=2.0)
    radius = torch.tensor([1.0, 3.0], dtype=double)
    torch.testing.assert_close(y, y0, rtol=0, atol=1e-6)
    torch.testing.assert_close(mean[:, 0], 2 * math.pi * radius, rtol=1e-6, atol=0)
    torch.testing.assert_close(mean[:, 1], 2 * (math.pi * radius) ** 2, rtol=1e-6, atol=0)


def polyline(layer, x, padding, norm, points=400):
    """Arclength and kinetic energy of a block by torchdiffeq, from differences of a fine grid's states."""
    y0 = x.transpose(0, 1)
    field = layer.bind(y0, padding, None)
    times = torch.linspace(0, 1, points + 1, dtype=x.dtype)
    states = torchdiffeq.odeint(lambda t, y: field(t.expand(len(y)), y), y0, times, method="midpoint")
    steps = states.diff(dim=0)
    valid = ~padding
    if norm == "sentence":
        speed = (steps * valid.unsqueeze(-1)).flatten(2).norm(dim=-1)
        return speed.sum(0), speed.square().sum(0) * points
    speed = steps.norm(dim=-1) * valid
    count = valid.sum(1)
    return speed.sum((0, 2)) / count, speed.square().sum((0, 2)) * points / count


@pytest.mark.parametrize("norm", ["token", "sentence"])
@pytest.mark.parametrize("gradient", ["backprop", "checkpoint", "adjoint"])
def test_a_real_layer_against_a_fine_grid(build, norm, gradient):
    """Values and gradients, with padding."""
    options = dict(node_solver="dopri5", node_rtol=1e-7, node_atol=1e-7, node_gradient=gradient)
    options.update(node_max_nfe=1000, node_step_control="batch" if gradient == "adjoint" else "sentence")
    # A smooth activation: where a kink is crossed, the grid's gradient is off by the grid's width.
    options["activation_fn"] = "gelu"
    layer = build("node_transformer", dtype=double, **options).encoder.layers[0].train()
    layer.path_config = PathConfig(norm=norm, gradient=True)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 2, 32, dtype=double, generator=generator).requires_grad_()
    padding = torch.tensor([[False] * 5, [True, True, False, False, False]])
    expected = torch.stack(polyline(layer, x, padding, norm))
    _, record = layer(x, padding)
    found = torch.stack([record.arclength, record.kinetic])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    inputs = [x, *layer.parameters()]
    weight = torch.rand(2, 2, dtype=double, generator=generator)
    wanted = torch.autograd.grad((weight * expected).sum(), inputs)
    for one, other in zip(torch.autograd.grad((weight * found).sum(), inputs), wanted):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4 * float(other.abs().max() + 1e-3))


@pytest.mark.parametrize("norm", ["token", "sentence"])
def test_a_half_precision_model(build, sample, norm):
    """The path is float32 around a bfloat16 field, within its error, and so is the penalty's gradient."""
    values = []
    for dtype in (torch.float32, torch.bfloat16):
        model = build("node_transformer", node_solver="rk4", node_steps=2).to(dtype).train()
        model.integrate_path(PathConfig(norm=norm, gradient=True))
        records = model(**sample()["net_input"])[1]["node"]
        length = sum(record.arclength.sum() for side in records.values() for record in side)
        assert length.dtype == torch.float32
        length.backward()
        gradients = [p.grad.float().flatten() for p in model.encoder.layers[0].parameters()]
        values.append((length, torch.cat(gradients)))
    (length, gradient), (half_length, half_gradient) = values
    assert half_length.item() == pytest.approx(length.item(), rel=0.02)
    assert torch.isfinite(half_gradient).all()
    assert torch.nn.functional.cosine_similarity(gradient, half_gradient, dim=0) > 0.98


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
