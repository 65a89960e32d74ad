"""What a solve is: its options, its result, and which implementation carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from fairseq_node.modules import runge_kutta
from fairseq_node.modules.runge_kutta import (  # noqa: F401 (the statuses are part of a result)
    ADAPTIVE,
    ARRIVED,
    BUDGET_SPENT,
    FIXED,
    NOT_FINITE,
    STEP_UNDERFLOW,
    TABLEAUS,
    Integrand,
    Solution,
    VectorField,
)

STEP_CONTROLS = ("sentence", "batch")
GRADIENTS = ("backprop", "checkpoint", "adjoint")
ON_FAILURE = ("error", "finish")
REASONS = {
    BUDGET_SPENT: "its budget of function evaluations is spent (max_nfe)",
    STEP_UNDERFLOW: "its step size underflowed",
    NOT_FINITE: "the vector field is not finite",
}


class InvalidOption(ValueError):
    """An option with a value that cannot be used; ``name`` is the field of the dataclass."""

    def __init__(self, name: str, message: str):
        super().__init__(f"{name} {message}")
        self.name, self.message = name, message


@dataclass(frozen=True)
class SolverConfig:
    """Options of a solve.

    Attributes:
        solver: a fixed grid (euler, midpoint, heun, rk4) or an adaptive pair (heun_euler, bosh3,
            dopri5).
        steps: steps of a fixed grid over the interval, >= 1; None means 1. Adaptive pairs ignore it.
        rtol, atol: tolerances of an adaptive pair, dimensionless, >= 0 and not both 0; a step is
            accepted when the weighted RMS of its error over a sentence's valid tokens is <= 1.
        step_control: "sentence" gives every row its own steps; "batch" one step size to all.
        gradient: "backprop" stores the activations of accepted steps, "checkpoint" recomputes each
            step in backward, "adjoint" solves the continuous adjoint backwards in time.
        max_nfe: evaluations that a row may spend in one adaptive solve.
        on_failure: "error", or "finish" the interval with one last fixed step; see :func:`solve`.
        time: length of the interval [0, time], > 0.

    Raises:
        InvalidOption: naming the field and what to use instead.
    """

    # Chosen by measurement: see the README.
    solver: str = "bosh3"
    steps: Optional[int] = None
    rtol: float = 1e-1
    atol: float = 1e-1
    step_control: str = "sentence"
    gradient: str = "backprop"
    max_nfe: int = 100
    on_failure: str = "finish"
    time: float = 1.0

    def __post_init__(self):
        _one_of("solver", self.solver, FIXED + ADAPTIVE)
        _one_of("step_control", self.step_control, STEP_CONTROLS)
        _one_of("gradient", self.gradient, GRADIENTS)
        _one_of("on_failure", self.on_failure, ON_FAILURE)
        if self.steps is not None and self.steps < 1:
            raise InvalidOption("steps", f"is {self.steps}, but a grid needs at least 1 step; use 1 or more")
        for name in ("rtol", "atol"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidOption(name, f"is {getattr(self, name)}; use a positive number such as 1e-2")
        if self.rtol == self.atol == 0:
            raise InvalidOption(
                "rtol", "and atol are both 0, which no step can satisfy; use for example 1e-2"
            )
        if not 0 < self.time < float("inf"):
            raise InvalidOption("time", f"is {self.time}; use a positive number such as 1")
        if self.adaptive and self.max_nfe < self.tableau.stages + 2:
            raise InvalidOption(
                "max_nfe",
                f"is {self.max_nfe}, but one step of {self.solver} and its start take "
                f"{self.tableau.stages + 2} evaluations; use {self.tableau.stages + 2} or more",
            )
        if self.gradient == "adjoint" and not (self.adaptive and self.step_control == "batch"):
            raise InvalidOption(
                "gradient",
                "adjoint solves backwards with one step size for the whole batch; use it with an adaptive "
                "solver and --node-step-control batch, or use --node-gradient checkpoint",
            )

    @property
    def adaptive(self) -> bool:
        return self.solver in ADAPTIVE

    @property
    def is_stock_layer(self) -> bool:
        """Whether a solve is x + F(x), what the discrete layer computes."""
        return self.solver == "euler" and (self.steps or 1) == 1 and self.time == 1

    @property
    def tableau(self) -> runge_kutta.Tableau:
        return TABLEAUS[self.solver]


def _one_of(name: str, value: str, choices) -> None:
    if value not in choices:
        raise InvalidOption(name, f"is {value!r}; use one of {', '.join(choices)}")


def solve(
    f: VectorField,
    y: Tensor,
    config: SolverConfig,
    *,
    valid: Optional[Tensor] = None,
    integrand: Optional[Integrand] = None,
    save_at: Optional[Tensor] = None,
) -> Solution:
    """Integrates ``dy/dt = f(t, y)`` from 0 to ``config.time``.

    Args:
        f: vector field ``f(t, y)``, ``t`` of shape ``(batch,)``. Has ``select(rows)`` if it holds
            tensors with a batch dimension, and ``tensors()``, all that needs a gradient, for adjoint.
        y: initial state, ``(batch, ...)``, float32 or float64.
        config: the options.
        valid: which entries exist, bool, ``(batch,)`` or ``(batch, seq_len)``.
        integrand: function of the derivative to be integrated along the path.
        save_at: times at which the states are wanted too, ascending, from 0 to ``config.time``,
            ``(times,)``; adaptive solvers only. They cost no evaluations, and carry no gradient.

    Returns:
        The solution. Rows that failed were completed and carry their reason in ``status``; raising
        an error instead is up to the caller, who knows what a row is (``config.on_failure``).
    """
    checkpoint = config.gradient == "checkpoint" and torch.is_grad_enabled()
    if not config.adaptive:
        return runge_kutta.fixed_grid(
            f,
            y,
            config.time,
            config.tableau,
            config.steps or 1,
            integrand=integrand,
            checkpoint=checkpoint,
            check=config.on_failure == "error",
        )
    if config.step_control == "batch":
        from fairseq_node.modules import batch_control

        return batch_control.solve(f, y, config, valid=valid, integrand=integrand, save_at=save_at)
    solution = runge_kutta.adaptive(
        f,
        y,
        config.time,
        config.tableau,
        rtol=config.rtol,
        atol=config.atol,
        max_nfe=config.max_nfe,
        valid=valid,
        integrand=integrand,
        checkpoint=checkpoint,
        dense=save_at is not None,
    )
    if save_at is not None:
        solution.saved = solution.dense.at(save_at.unsqueeze(1).expand(-1, len(y)))
    return solution
