"""What a solve leaves behind: tensors stored for backward, and their precision."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fairseq_node.modules import batch_control, solver  # noqa: F401  torchdiffeq makes its tables on import
from fairseq_node.modules.solver import SolverConfig

BATCH, DIM, WIDE = 2, 4, 512
STATE = BATCH * DIM * 4  # bytes


class Wide:
    """A field whose activations are 128 times larger than its state."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.up = torch.randn(DIM, WIDE, generator=generator, requires_grad=True)
        self.down = (0.1 * torch.randn(WIDE, DIM, generator=generator)).requires_grad_()

    def __call__(self, t, y):
        return torch.tanh(y @ self.up) @ self.down / WIDE

    def select(self, rows):
        return self

    def tensors(self):
        return (self.up, self.down)


def stored_bytes(steps, gradient):
    """Distinct bytes kept for backward by a solve of ``steps`` steps of rk4."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    y = torch.ones(BATCH, DIM, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        solver.solve(Wide(), y, SolverConfig(solver="rk4", steps=steps, gradient=gradient))
    return sum(storage.nbytes() for storage in storages.values())


def test_checkpoint_stores_states_and_no_activations():
    """Per evaluation backprop stores the wide activation; checkpoint at most a few states."""
    steps = (3, 12, 50)  # NFE 12, 48, 200
    for gradient, least, most in (("backprop", BATCH * WIDE * 4, None), ("checkpoint", 0, 4 * STATE)):
        sizes = [stored_bytes(n, gradient) for n in steps]
        for (n, size), (m, larger) in zip(zip(steps, sizes), zip(steps[1:], sizes[1:])):
            growth = (larger - size) / (4 * (m - n))
            assert growth >= least and (most is None or growth <= most), (gradient, sizes)


class NoDouble(TorchDispatchMode):
    """Fails where an operation returns a float64 tensor, as a device without float64 would."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in tree_flatten(out)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64:
                raise AssertionError(f"{function} made a float64 tensor")
        return out


def test_the_guard_sees_float64():
    with pytest.raises(AssertionError, match="float64"), NoDouble():
        torch.ones(1).double()


@pytest.mark.parametrize("name", ["rk4", "heun_euler", "bosh3", "dopri5"])
@pytest.mark.parametrize(
    "control,gradient",
    [
        ("sentence", "backprop"),
        ("sentence", "checkpoint"),
        ("batch", "backprop"),
        ("batch", "checkpoint"),
        ("batch", "adjoint"),
    ],
)
def test_a_float32_solve_makes_no_float64_tensor(name, control, gradient):
    if name == "rk4" and control == "batch":
        control, gradient = "sentence", "backprop"  # a grid has no steps to control
    config = SolverConfig(solver=name, step_control=control, gradient=gradient, rtol=1e-3, atol=1e-3)
    y = torch.ones(BATCH, DIM, requires_grad=True)
    field = Wide()
    with NoDouble():
        solution = solver.solve(field, y, config, integrand=torch.sin)
        (solution.y.sum() + solution.integral.sum()).backward()
    assert torch.isfinite(y.grad).all()
