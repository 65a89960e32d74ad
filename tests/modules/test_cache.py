"""Keys and values between Chebyshev nodes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_node.modules.cache import (
    DecodeConfig,
    DepthCache,
    barycentric_weights,
    chebyshev_nodes,
    reorder,
)
from fairseq_node.modules.solver import InvalidOption

double = torch.float64


@given(nodes=st.integers(2, 12), time=st.sampled_from([0.5, 1.0, 3.0]), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_polynomials_below_the_number_of_nodes_are_exact(nodes, time, seed):
    generator = torch.Generator().manual_seed(seed)
    coefficients = torch.randn(nodes, dtype=double, generator=generator)
    t = time * torch.rand(20, dtype=double, generator=generator)

    def polynomial(x):
        return sum(c * (x / time) ** power for power, c in enumerate(coefficients))

    points = chebyshev_nodes(nodes, time, double)
    assert points[0] == 0 and points[-1] == time and (points.diff() > 0).all()
    weights = barycentric_weights(t, points)
    torch.testing.assert_close(weights.sum(1), torch.ones(20, dtype=double))
    torch.testing.assert_close(weights @ polynomial(points), polynomial(t), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, double])
def test_weights_at_a_node_are_those_of_the_node(dtype):
    points = chebyshev_nodes(7, 1.0, dtype)
    assert torch.equal(barycentric_weights(points, points), torch.eye(7, dtype=dtype))
    beside = points * (1 + torch.finfo(dtype).eps)
    assert torch.isfinite(barycentric_weights(beside, points)).all()


def test_the_error_falls_geometrically():
    """For a smooth function as by theory: Trefethen, Approximation Theory and Approximation Practice, 8.2."""
    t = torch.linspace(0, 1, 101, dtype=double)
    errors = []
    for nodes in (4, 8, 16):
        points = chebyshev_nodes(nodes, 1.0, double)
        errors.append(
            float((barycentric_weights(t, points) @ torch.sin(6 * points) - torch.sin(6 * t)).abs().max())
        )
    assert errors[0] > 100 * errors[1] > 1e5 * errors[2]


def test_positions_are_moved_interpolated_and_selected():
    """Linear in t, so that two nodes are exact; rows at times of their own."""
    generator = torch.Generator().manual_seed(0)
    nodes = chebyshev_nodes(2, 1.0, double)
    slopes = torch.randn(
        3, 2, 3, 4, 5, dtype=double, generator=generator
    )  # row, key or value, head, position

    def at(t, rows, positions):
        return (slopes[rows, :, :, :positions] * t.view(-1, 1, 1, 1, 1)).unbind(1)

    state = {}
    order = torch.arange(3)
    for position in range(3):
        cache = DepthCache(state, nodes)
        assert cache.length == position
        t = torch.rand(3, dtype=double, generator=generator)
        new = slopes[order][:, :, :, position : position + 1] * t.view(-1, 1, 1, 1, 1)
        keys, values, _ = cache.extended(t, new[:, 0], new[:, 1], None)
        expected = at(t, order, position + 1)
        torch.testing.assert_close(keys, expected[0])
        torch.testing.assert_close(values, expected[1])

        rows, times = torch.tensor([2, 0]), torch.rand(2, 3, dtype=double, generator=generator)
        part = cache.select(rows).ahead(times)
        for column in range(3):
            now = times[:, column]
            new = slopes[order[rows]][:, :, :, position : position + 1] * now.view(-1, 1, 1, 1, 1)
            keys, values, _ = part.extended(now, new[:, 0], new[:, 1], None)
            torch.testing.assert_close(values, at(now, order[rows], position + 1)[1])

        along = slopes[order][:, None, :, :, position : position + 1] * nodes.view(1, -1, 1, 1, 1, 1)
        cache.store(along[:, :, 0], along[:, :, 1], None)
        for turn in (torch.tensor([1, 2, 0]), torch.tensor([0, 0, 1])):
            state = reorder(state, turn)
            order = order[turn]


def test_padding_is_remembered():
    nodes = chebyshev_nodes(2, 1.0, torch.float32)
    state, zero = {}, torch.zeros(2, 1, 1, 3)
    for padding in (None, torch.tensor([[False], [True]]), None):
        cache = DepthCache(state, nodes)
        *_, seen = cache.extended(torch.zeros(2), zero, zero, padding)
        cache.store(torch.zeros(2, 2, 1, 1, 3), torch.zeros(2, 2, 1, 1, 3), padding)
    assert seen.tolist() == [[False, False, False], [False, True, False]] == state["padding"].tolist()


def test_bad_options_are_named():
    for options, name in ((dict(decode="fast"), "decode"), (dict(decode_nodes=1), "decode_nodes")):
        with pytest.raises(InvalidOption) as caught:
            DecodeConfig(**options)
        assert caught.value.name == name and "use" in str(caught.value)
