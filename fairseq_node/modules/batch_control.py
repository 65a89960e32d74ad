"""One step size for the whole batch: torchdiffeq's solvers, and its continuous adjoint.

This is how most work on neural ODEs solves, and the only control under which the adjoint is offered.
The error norm still ignores padding, the budget and failures are those of the per-sentence solver.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Optional

import torch
import torchdiffeq
from torch import Tensor

from fairseq_node.modules import runge_kutta
from fairseq_node.modules.runge_kutta import (
    ARRIVED,
    BUDGET_SPENT,
    NOT_FINITE,
    STEP_UNDERFLOW,
    Solution,
)

_METHODS = {"dopri5": "dopri5", "bosh3": "bosh3", "heun_euler": "adaptive_heun"}


class _Stop(Exception):
    """The forward solve cannot go on."""


@dataclass
class _System:
    """The state with its integral, as torchdiffeq wants to see it, and a count of what it does."""

    evaluate: runge_kutta.VectorField
    integrand: Optional[runge_kutta.Integrand]
    batch: int
    max_nfe: int
    nfe: int = 0
    accepted: int = 0
    rejected: int = 0
    reached: float = 0.0
    replays: Optional[Tensor] = None  # counts evaluations once the forward solve is over

    def __call__(self, t: Tensor, state):
        if self.replays is not None:
            self.replays += 1
        else:
            if self.nfe >= self.max_nfe:
                raise _Stop
            self.nfe += 1
        y = state[0]
        times = t.to(y.dtype).expand(self.batch)
        dy = self.evaluate(times, y)
        return (dy,) if self.integrand is None else (dy, self.integrand(dy))

    def callback_accept_step(self, t, state, dt):
        self.accepted += 1
        self.reached = float((t + dt).detach())

    def callback_reject_step(self, t, state, dt):
        self.rejected += 1


def _as_now(f, device_type: str):
    """The field, always evaluated in the automatic mixed precision of this moment: the adjoint evaluates
    it in backward, where there is none, on keys and values that were made in it."""
    if hasattr(torch, "get_autocast_dtype"):  # torch 2.4
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    elif device_type == "cpu":
        enabled, dtype = torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()
    else:
        enabled, dtype = torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()

    def evaluate(t: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device_type, dtype=dtype, enabled=enabled):
            return f(t, y)

    return evaluate


def solve(
    f, y: Tensor, config, *, valid: Optional[Tensor] = None, integrand=None, save_at: Optional[Tensor] = None
) -> Solution:
    """See :func:`fairseq_node.modules.solver.solve`; every row reports the batch's counts.

    A solve that cannot go on is repeated up to the last accepted step, which costs nothing but time
    in a rare case, and completed by one Euler step.
    """
    batch = len(y)
    weights = None
    if valid is not None:
        weights = valid.reshape(*valid.shape, *[1] * (y.dim() - valid.dim())).to(y.dtype)
    replays = torch.zeros(batch, dtype=torch.long, device=y.device)
    evaluate = f
    if config.gradient == "checkpoint" and torch.is_grad_enabled():
        # torchdiffeq has no steps to take hold of: each evaluation is recomputed on its own.
        rows = torch.arange(batch, device=y.device)
        evaluate = functools.partial(runge_kutta.recomputed(f, 1, replays), rows)
    elif config.gradient == "adjoint":
        evaluate = _as_now(f, y.device.type)
    system = _System(evaluate, integrand, batch, config.max_nfe)
    if y.numel() == 0:
        solution = runge_kutta.adaptive(
            f, y, config.time, config.tableau, rtol=config.rtol, atol=config.atol, integrand=integrand
        )
        solution.saved = None if save_at is None else y.expand(len(save_at), *y.shape)
        return solution
    start = (y,)
    if integrand is not None:
        start = (y, torch.zeros_like(integrand(torch.zeros_like(y))))

    def norm(state):
        value = state[0]
        if weights is None:
            return value.square().mean().sqrt()
        squares = torch.where(weights > 0, value.square(), 0.0)
        return (squares.sum() / weights.expand_as(value).sum().clamp(min=1.0)).sqrt()

    def run(end: float):
        times = y.new_tensor([0.0, end])
        if save_at is not None:
            inner = save_at[(times[0] < save_at) & (save_at < times[1])]
            times = torch.cat([times[:1], inner, times[1:]])
        arguments = dict(
            t=times,
            rtol=config.rtol,
            atol=config.atol,
            method=_METHODS[config.solver],
            # float32 time like the state: some devices have no float64. Without step_t torchdiffeq steps
            # beyond the end and interpolates, which at loose tolerances is off by more than they allow.
            options={"norm": norm, "dtype": y.dtype, "step_t": times[-1:]},
        )
        if config.gradient == "adjoint" and torch.is_grad_enabled():
            result = torchdiffeq.odeint_adjoint(
                system,
                start,
                adjoint_params=f.tensors(),
                adjoint_options={"dtype": y.dtype, "step_t": times[:1]},
                **arguments,
            )
        else:
            result = torchdiffeq.odeint(system, start, **arguments)
        return [value[-1] for value in result], result[0]

    status, reached, last = ARRIVED, config.time, None
    try:
        state, path = run(config.time)
    except _Stop:
        status = BUDGET_SPENT
    except AssertionError as error:  # how torchdiffeq reports both
        status = STEP_UNDERFLOW if "underflow" in str(error) else NOT_FINITE
    nfe, accepted, rejected = system.nfe, system.accepted, system.rejected
    if status != ARRIVED:
        reached, system.max_nfe = system.reached, float("inf")
        state, path = run(reached) if reached > 0 else (list(start), y.unsqueeze(0))
        last = f(y.new_full((batch,), reached), state[0])
        if torch.isfinite(last).all():
            rest = config.time - reached
            state[0] = state[0] + rest * last
            if integrand is not None:
                state[1] = state[1] + rest * integrand(last)
        else:
            status = NOT_FINITE
    system.replays = replays

    def count(value: int) -> Tensor:
        return torch.full((batch,), value, dtype=torch.long, device=y.device)

    return Solution(
        y=state[0],
        nfe=count(nfe),
        accepted=count(accepted),
        rejected=count(rejected),
        status=count(status),
        t=y.new_full((batch,), reached),
        dt=y.new_full((batch,), float("nan")),
        integral=state[1] if integrand is not None else None,
        nfe_backward=replays,
        saved=None if save_at is None else _saved(path, save_at, reached, state[0], config.time),
    )


def _saved(path: Tensor, save_at: Tensor, reached: float, end: Tensor, time: float) -> Tensor:
    """The states at ``save_at``: those that torchdiffeq gave up to ``reached``, and points of the straight
    line from there to the ``end`` for a solve that was cut short."""
    before = path[:-1] if save_at[0] == 0 else path[1:-1]
    rest = save_at[len(before) :]
    fraction = (rest - reached) / max(time - reached, torch.finfo(path.dtype).tiny)
    line = path[-1] + fraction.view(-1, *[1] * end.dim()) * (end - path[-1])
    return torch.cat([before, line]).detach()
