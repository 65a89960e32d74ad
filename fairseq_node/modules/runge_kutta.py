"""Explicit Runge-Kutta methods in which every row of the batch is an initial value problem of its own.

The first dimension of the state is the batch: each row has its own time, step size, error norm and
accept/reject decision, and a row that has arrived leaves the batch, so that the cost of a solve
follows the *sum* of the rows' function evaluations. What a row gets does not depend on its
neighbours. Nothing here knows of Transformers.

A vector field is a callable ``f(t, y)`` with ``t`` of shape ``(batch,)`` and ``y`` of shape
``(batch, ...)``, returning the time derivative of ``y``. If it closes over tensors that have a batch
dimension it offers ``f.select(rows)``, the same field for those rows only. If it can save work by
knowing the times of the next evaluations it offers ``f.ahead(times)``, ``(batch, times)``, the same field
for evaluations at these times in this order.

>>> import torch
>>> y0 = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
>>> rate = torch.tensor([[1.0], [50.0]], dtype=torch.float64)
>>> class Decay:
...     def __init__(self, rate): self.rate = rate
...     def __call__(self, t, y): return -self.rate * y
...     def select(self, rows): return Decay(self.rate[rows])
>>> solution = adaptive(Decay(rate), y0, 1.0, TABLEAUS["dopri5"], rtol=1e-8, atol=1e-8)
>>> torch.allclose(solution.y, torch.exp(-rate), atol=1e-7)
True
>>> bool(solution.nfe[0] < solution.nfe[1])
True

Sources: Hairer, Nørsett & Wanner, Solving Ordinary Differential Equations I (2nd ed., 1993), cited as
HNW; Dormand & Prince 1980; Bogacki & Shampine 1989.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Callable, List, Optional, Sequence, Tuple

import torch
import torch.utils.checkpoint
from torch import Tensor

VectorField = Callable[[Tensor, Tensor], Tensor]
#: Maps a derivative ``(batch, ...)`` to what is integrated along the path, ``(batch, ...)``.
Integrand = Callable[[Tensor], Tensor]

#: Why a row stopped adapting its steps; anything but ARRIVED was completed by one Euler step.
ARRIVED, BUDGET_SPENT, STEP_UNDERFLOW, NOT_FINITE = range(4)

SAFETY, MIN_FACTOR, MAX_FACTOR = 0.9, 0.2, 10.0
#: Weight of the previous error in the PI controller (HNW II.4, and the code DOPRI5).
PI_BETA = 0.04


@dataclass(frozen=True)
class Tableau:
    """Butcher tableau of an explicit method.

    Args:
        order: order of consistency of the solution that is carried on.
        c: times of the stages, as fractions of the step.
        a: rows of the strictly lower triangular matrix; row ``i`` has ``i`` entries.
        b: weights of the solution.
        error: ``b - b_hat``, weights of the local error estimate; None for a fixed-grid method.
        error_order: the power of the step size that the estimate is proportional to.
        fsal: whether the last stage is the derivative at the new state (first same as last).
        dense: extra weights that raise the cubic Hermite interpolant to order 4, if there are any.
    """

    order: int
    c: Tuple[float, ...]
    a: Tuple[Tuple[float, ...], ...]
    b: Tuple[float, ...]
    error: Optional[Tuple[float, ...]] = None
    error_order: int = 0
    fsal: bool = False
    dense: Optional[Tuple[float, ...]] = None

    @property
    def stages(self) -> int:
        return len(self.b)


TABLEAUS = {
    "euler": Tableau(order=1, c=(0.0,), a=((),), b=(1.0,)),
    "midpoint": Tableau(order=2, c=(0.0, 1 / 2), a=((), (1 / 2,)), b=(0.0, 1.0)),
    "heun": Tableau(order=2, c=(0.0, 1.0), a=((), (1.0,)), b=(1 / 2, 1 / 2)),
    "rk4": Tableau(
        order=4,
        c=(0.0, 1 / 2, 1 / 2, 1.0),
        a=((), (1 / 2,), (0.0, 1 / 2), (0.0, 0.0, 1.0)),
        b=(1 / 6, 1 / 3, 1 / 3, 1 / 6),
    ),
    "heun_euler": Tableau(
        order=2,
        c=(0.0, 1.0),
        a=((), (1.0,)),
        b=(1 / 2, 1 / 2),
        error=(-1 / 2, 1 / 2),
        error_order=2,
    ),
    "bosh3": Tableau(
        order=3,
        c=(0.0, 1 / 2, 3 / 4, 1.0),
        a=((), (1 / 2,), (0.0, 3 / 4), (2 / 9, 1 / 3, 4 / 9)),
        b=(2 / 9, 1 / 3, 4 / 9, 0.0),
        error=(2 / 9 - 7 / 24, 1 / 3 - 1 / 4, 4 / 9 - 1 / 3, -1 / 8),
        error_order=3,
        fsal=True,
    ),
    "dopri5": Tableau(
        order=5,
        c=(0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0),
        a=(
            (),
            (1 / 5,),
            (3 / 40, 9 / 40),
            (44 / 45, -56 / 15, 32 / 9),
            (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
            (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
            (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
        ),
        b=(35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84, 0.0),
        error=(71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40),
        error_order=5,
        fsal=True,
        dense=(
            -12715105075 / 11282082432,
            0.0,
            87487479700 / 32700410799,
            -10690763975 / 1880347072,
            701980252875 / 199316789632,
            -1453857185 / 822651844,
            69997945 / 29380423,
        ),
    ),
}
FIXED = tuple(name for name, tableau in TABLEAUS.items() if tableau.error is None)
ADAPTIVE = tuple(name for name, tableau in TABLEAUS.items() if tableau.error is not None)


@dataclass
class DenseOutput:
    """The solution between the grid points: call it with a time (a number or ``(batch,)``).

    Interpolates with the quartic of HNW II.6 (dopri5), the cubic Hermite polynomial (bosh3), or the
    parabola through both end points with the slope of the first (methods without FSAL).
    """

    y0: Tensor
    segments: List[Tuple[Tensor, Tensor, Tensor, List[Tensor]]] = field(default_factory=list)

    def add(self, tableau: Tableau, rows, t, dt, y, y1, stages) -> None:
        """Records an accepted step of some rows."""
        h = _column(dt, y)
        difference = y1 - y
        bend = h * stages[0] - difference
        coefficients = [y, difference, bend]
        if tableau.fsal:
            coefficients.append(difference - h * stages[-1] - bend)
        if tableau.dense is not None:
            coefficients.append(h * _combine(tableau.dense, stages))
        self.segments.append((rows, t, dt, coefficients))

    def add_line(self, rows, t, dt, y, y1) -> None:
        """Records the Euler step that completes a row (``y1 = y`` for a row that stays where it is)."""
        self.segments.append((rows, t, dt, [y, y1 - y]))

    def __call__(self, t) -> Tensor:
        times = torch.as_tensor(t, dtype=self.y0.dtype, device=self.y0.device)
        return self.at(times.expand(1, len(self.y0)))[0]

    def at(self, times: Tensor) -> Tensor:
        """The states at several times of each row: ``(times, batch)`` to ``(times, batch, ...)``."""
        y = self.y0.expand(len(times), *self.y0.shape).clone()
        for rows, start, dt, coefficients in self.segments:
            # >= start and no upper bound: a later segment overwrites an earlier one.
            theta = (times[:, rows] - start) / dt
            value = _interpolate(theta, coefficients)
            y[:, rows] = torch.where(_column(theta, value, 2) >= 0, value, y[:, rows])
        return y


def _interpolate(theta: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
    """Nested evaluation of HNW II.6.12: factors theta and (1 - theta) alternate."""
    theta = _column(theta, coefficients[0].unsqueeze(0), 2)
    value = coefficients[-1]
    for depth in range(len(coefficients) - 2, -1, -1):
        value = coefficients[depth] + (theta if depth % 2 == 0 else 1 - theta) * value
    return value


@dataclass
class Solution:
    """What a solve returns.

    Attributes:
        y: state at the end time, ``(batch, ...)``.
        nfe: evaluations of the field for each row, all of them counted, ``(batch,)``.
        accepted, rejected: steps of each row, ``(batch,)``.
        status: ARRIVED, or why the row was completed by one last Euler step, ``(batch,)``.
        t, dt: time reached by accepted steps, and the step size tried next, ``(batch,)``.
        nfe_backward: evaluations repeated in backward; counted up while backward runs, ``(batch,)``.
        integral: the integrand over the path, or None without an integrand.
        dense: the solution in between, if it was asked for.
        saved: the states at the times that were asked for, ``(times, batch, ...)``.
    """

    y: Tensor
    nfe: Tensor
    accepted: Tensor
    rejected: Tensor
    status: Tensor
    t: Tensor
    dt: Tensor
    nfe_backward: Tensor
    integral: Optional[Tensor] = None
    dense: Optional[DenseOutput] = None
    saved: Optional[Tensor] = None


def _column(values: Tensor, like: Tensor, dims: int = 1) -> Tensor:
    """Reshapes ``(batch,)`` so that it broadcasts against ``like``, ``(batch, ...)``; or, with more
    than one dimension, all of them."""
    return values.reshape(*values.shape[:dims], *[1] * (like.dim() - dims))


def _select(f: VectorField, rows: Tensor) -> VectorField:
    return f.select(rows) if hasattr(f, "select") else f


def _combine(weights: Sequence[float], stages: Sequence[Tensor]) -> Tensor:
    """Weighted sum of the stages; zero weights cost nothing."""
    total = None
    for weight, stage in zip(weights, stages):
        if weight != 0.0:
            if total is None:
                total = stage if weight == 1.0 else weight * stage
            else:
                total = torch.add(total, stage, alpha=weight)
    return total


def step(tableau: Tableau, f: VectorField, t: Tensor, dt: Tensor, y: Tensor, k1: Tensor):
    """One step from ``(t, y)``.

    Args:
        t, dt: time and step size of each row, ``(batch,)``.
        y: state, ``(batch, ...)``.
        k1: ``f(t, y)``.

    Returns:
        ``(y1, stages)``: the new state, and the derivatives at all stages, ``k1`` first.
    """
    h = _column(dt, y)
    stages = [k1]
    y1 = None
    if hasattr(f, "ahead") and tableau.stages > 1:
        f = f.ahead(torch.stack([t + c * dt for c in tableau.c[1:]], dim=1))
    for c, row in zip(tableau.c[1:], tableau.a[1:]):
        y1 = torch.addcmul(y, h, _combine(row, stages))
        stages.append(f(t + c * dt, y1))
    if not tableau.fsal:  # with FSAL the last stage was evaluated at the new state
        y1 = torch.addcmul(y, h, _combine(tableau.b, stages))
    return y1, stages


def _step_with_error(tableau, integrand, dense, f, t, dt, y, k1):
    """A step, its local error estimate, last stage, quadrature increment and (for dense output) stages."""
    y1, stages = step(tableau, f, t, dt, y, k1)
    error = increment = None
    if tableau.error is not None:
        with torch.no_grad():
            error = _column(dt, y) * _combine(tableau.error, stages)
            for weight, stage in zip(tableau.error, stages):
                if weight == 0.0:  # the estimate does not see it, but must not be finite if it is not
                    error = torch.add(error, 0.0 * stage)
    if integrand is not None:
        increment = _quadrature(tableau, integrand, dt, stages)
    return y1, stages[-1], error, increment, stages if dense else None


def _quadrature(tableau, integrand, dt, stages):
    # The weights b applied to the integrand at the stages are the method applied to the system
    # augmented by q' = integrand(y'), because q' does not depend on q.
    values = [integrand(stage) if weight != 0.0 else None for weight, stage in zip(tableau.b, stages)]
    total = _combine(tableau.b, values)
    return _column(dt, total) * total


def _evaluate(f, t, y):
    return f(t, y)


def _stored(function):
    """Calls ``function`` as it is; ``rows`` (for the bookkeeping of ``recomputed``) is not needed."""
    return lambda rows, *arguments: function(*arguments)


def recomputed(function, evaluations: int, replays: Tensor):
    """Keeps the inputs of a call only and repeats it in backward, counting its evaluations per row.

    The field must be a function (no fresh random numbers), so there is no random state to restore.
    """

    def run(rows, *arguments):
        called = False

        def call(*arguments):
            nonlocal called
            if called:
                replays.index_add_(0, rows, torch.full_like(rows, evaluations))
            called = True
            return function(*arguments)

        return torch.utils.checkpoint.checkpoint(
            call, *arguments, use_reentrant=False, preserve_rng_state=False
        )

    return run


def fixed_grid(
    f: VectorField,
    y: Tensor,
    t1: float,
    tableau: Tableau,
    steps: int,
    *,
    integrand: Optional[Integrand] = None,
    checkpoint: bool = False,
    check: bool = False,
) -> Solution:
    """Integrates from 0 to ``t1`` in ``steps`` equal steps.

    Args:
        f: the vector field.
        y: initial state, ``(batch, ...)``.
        t1: end time, > 0.
        steps: number of steps, >= 1.
        integrand: also integrate this function of the derivative along the path.
        checkpoint: recompute each step in backward instead of storing its activations.
        check: whether to look for rows that are not finite any more: ``status`` and ``t`` say so.
    """
    batch = len(y)
    ones = y.new_ones(batch)
    dt = ones * (t1 / steps)
    rows = torch.arange(batch, device=y.device)
    replays = torch.zeros_like(rows)
    reached, status = ones * t1, torch.zeros_like(rows)

    def advance(t, dt, y):
        return _step_with_error(tableau, integrand, False, f, t, dt, y, f(t, y))

    run = recomputed(advance, tableau.stages, replays) if checkpoint else _stored(advance)
    integral = None
    for n in range(steps):
        start = n * t1 / steps
        y, _, _, increment, _ = run(rows, ones * start, dt, y)
        if increment is not None:
            integral = increment if integral is None else integral + increment
        if check:
            lost = ~torch.isfinite(y.detach()).flatten(1).all(1)
            reached = torch.where(lost, reached.clamp(max=start), reached)
            status = torch.where(lost, NOT_FINITE, status)
    count = torch.full_like(rows, steps)
    return Solution(
        y=y,
        nfe=count * tableau.stages,
        accepted=count,
        rejected=torch.zeros_like(rows),
        status=status,
        t=reached,
        dt=dt,
        nfe_backward=replays,
        integral=integral,
    )


@dataclass
class _Active:
    """The rows that have not arrived yet; every field has the batch dimension first."""

    rows: Tensor
    t: Tensor
    dt: Tensor
    y: Tensor
    k1: Tensor
    fresh: Tensor  # whether k1 is the derivative at (t, y)
    weights: Optional[Tensor]
    previous: Tensor  # error ratio of the last accepted step
    nfe: Tensor
    accepted: Tensor
    rejected: Tensor
    status: Tensor
    integral: Optional[Tensor]

    def select(self, index: Tensor) -> _Active:
        chosen = {}
        for item in fields(self):
            value = getattr(self, item.name)
            chosen[item.name] = None if value is None else value.index_select(0, index)
        return _Active(**chosen)


class _Norm:
    """Weighted root mean square over the entries of a row that count (HNW II.4.11)."""

    def __init__(self, rtol: float, atol: float):
        self.rtol, self.atol = rtol, atol

    def scale(self, *states: Tensor) -> Tensor:
        size = states[0].abs()
        for state in states[1:]:
            size = torch.maximum(size, state.abs())
        # With atol = 0 an entry that is zero and stays zero has no error: not 0 / 0.
        return (self.atol + self.rtol * size).clamp(min=torch.finfo(size.dtype).tiny)

    @staticmethod
    def rms(value: Tensor, weights: Optional[Tensor]) -> Tensor:
        squares = value.square()
        if weights is None:
            return squares.flatten(1).mean(1).sqrt()
        # 0 x inf is NaN: entries that do not count must not be able to spoil the norm.
        squares = torch.where(weights > 0, squares, 0.0).flatten(1)
        count = weights.expand_as(value).flatten(1).sum(1)
        return (squares.sum(1) / count.clamp(min=1.0)).sqrt()


def _initial_step(f, active, norm: _Norm, tableau: Tableau, t1: float) -> Tensor:
    """HNW II.4, "Starting step size"; costs one evaluation. A row without entries takes one step."""
    t, y, k1, weights = active.t, active.y, active.k1, active.weights
    scale = norm.scale(y)
    d0, d1 = norm.rms(y / scale, weights), norm.rms(k1 / scale, weights)
    # Where size or slope vanish the recipe has nothing to go by; much less than t1 / 1000 would
    # only measure the rounding error of the second derivative.
    degenerate = (d0 < 1e-5) | (d1 < 1e-5)
    h0 = torch.where(degenerate, torch.full_like(d0, 1e-3 * t1), 0.01 * d0 / d1).clamp(max=t1)
    k2 = f(t + h0, torch.addcmul(y, _column(h0, y), k1))
    d2 = norm.rms((k2 - k1) / scale, weights) / h0
    slope = torch.maximum(d1, d2)
    h1 = (0.01 / slope).pow(1.0 / (tableau.order + 1))
    h1 = torch.where(slope <= 1e-15, 100 * h0, torch.minimum(100 * h0, h1))
    # A trial evaluation that overflowed says nothing: start from the first guess.
    h1 = torch.where(torch.isfinite(d2), h1, h0).clamp(max=t1)
    if weights is not None:
        empty = weights.flatten(1).sum(1) == 0
        h1 = torch.where(empty, torch.full_like(h1, t1), h1)
    return h1


def adaptive(
    f: VectorField,
    y: Tensor,
    t1: float,
    tableau: Tableau,
    *,
    rtol: float,
    atol: float,
    max_nfe: int = 1_000_000,
    valid: Optional[Tensor] = None,
    integrand: Optional[Integrand] = None,
    checkpoint: bool = False,
    dense: bool = False,
) -> Solution:
    """Integrates every row from 0 to ``t1`` with steps of its own.

    A step is accepted when the weighted RMS of its error estimate, over the row's valid entries, is
    at most 1; a PI controller sets the next one. A row that spends its budget, whose step size
    underflows, or whose derivative is not finite, is completed by one Euler step (or, where not even
    the derivative at its state is finite, left where it is) and says so in ``status``.

    Gradients flow through accepted steps only, with the step sizes held constant.

    Args:
        f: the vector field, with ``select`` if it holds tensors with a batch dimension.
        y: initial state, ``(batch, ...)``.
        t1: end time, > 0.
        tableau: one of the embedded pairs.
        rtol, atol: relative and absolute tolerance, dimensionless, >= 0 and not both 0.
        max_nfe: evaluations that a row may spend, >= stages + 2.
        valid: which entries exist, bool, broadcastable to ``y`` from the left (``(batch,)``,
            ``(batch, seq_len)``, ...); the others are not part of the error norm.
        integrand: also integrate this function of the derivative; not part of the error norm.
        checkpoint: recompute each step in backward instead of storing its activations.
        dense: return the solution between the grid points too.
    """
    batch, device = len(y), y.device
    zeros = torch.zeros(batch, dtype=torch.long, device=device)
    if y.numel() == 0:
        empty = y.new_zeros(batch)
        integral = None if integrand is None else integrand(torch.zeros_like(y))
        record = DenseOutput(y) if dense else None
        return Solution(y, zeros, zeros, zeros, zeros, empty + t1, empty + t1, zeros, integral, record)

    norm = _Norm(rtol, atol)
    shortest = torch.finfo(y.dtype).eps * t1
    replays = torch.zeros_like(zeros)
    advance = functools.partial(_step_with_error, tableau, integrand, dense)
    if checkpoint:
        evaluate = recomputed(_evaluate, 1, replays)
        advance = recomputed(advance, tableau.stages - 1, replays)
    else:
        evaluate, advance = _stored(_evaluate), _stored(advance)
    weights = None
    if valid is not None:
        weights = valid.reshape(*valid.shape, *[1] * (y.dim() - valid.dim())).to(y.dtype)

    active = _Active(
        rows=torch.arange(batch, device=device),
        t=y.new_zeros(batch),
        dt=y.new_zeros(batch),
        y=y,
        k1=torch.zeros_like(y),
        fresh=torch.zeros(batch, dtype=torch.bool, device=device),
        weights=weights,
        previous=y.new_ones(batch),
        nfe=zeros,
        accepted=zeros,
        rejected=zeros,
        status=zeros,
        integral=None if integrand is None else torch.zeros_like(integrand(torch.zeros_like(y))),
    )
    record = DenseOutput(y) if dense else None
    done: List[_Active] = []

    active, f = _refresh(active, f, evaluate, done, record)
    with torch.no_grad():
        active.dt = _initial_step(f, active, norm, tableau, t1)
    active.nfe = active.nfe + 1

    while len(active.rows):
        active, f = _refresh(active, f, evaluate, done, record)
        # Stop the rows that cannot afford another step, or whose step has no length any more.
        # Without FSAL the derivative at the end of the step must be affordable too.
        spent = active.nfe + tableau.stages - int(tableau.fsal) > max_nfe
        stop = spent | (active.dt < shortest)
        if stop.any():
            why = torch.where(spent, BUDGET_SPENT, STEP_UNDERFLOW)
            active.status = torch.where(active.status == ARRIVED, why, active.status)
            last, keep = _rows_where(stop), _rows_where(~stop)
            done.append(_finish(active.select(last), t1, integrand, record))
            active, f = active.select(keep), _select(f, keep)
            continue

        remaining = t1 - active.t
        final = 1.01 * active.dt >= remaining  # rather one slightly longer step than a tiny last one
        dt = torch.where(final, remaining, active.dt)
        y1, k_last, error, increment, stages = advance(active.rows, f, active.t, dt, active.y, active.k1)
        with torch.no_grad():
            ratio = norm.rms(error / norm.scale(active.y, y1), active.weights)
        finite = torch.isfinite(ratio)
        accept = ratio <= 1.0
        arrived = accept & final
        all_finite, all_accepted, any_arrived, all_arrived = torch.stack(
            [finite.all(), accept.all(), arrived.any(), arrived.all()]
        ).tolist()
        if not all_finite and torch.is_grad_enabled():
            # The rows that blew up must leave the graph: their zero gradient times their infinite
            # activations would be NaN in the gradient of every shared parameter. Not counted as
            # evaluations, since the finite rows learn nothing from it.
            good = _rows_where(finite)
            part = active.select(good)
            results = advance(part.rows, _select(f, good), part.t, dt[good], part.y, part.k1)
            y1 = active.y.index_copy(0, good, results[0])
            k_last = active.k1.index_copy(0, good, results[1])
            if increment is not None:
                increment = torch.zeros_like(increment).index_copy(0, good, results[3])

        if dense:
            taken = _rows_where(accept)
            record.add(
                tableau,
                active.rows[taken],
                active.t[taken],
                dt[taken],
                active.y[taken].detach(),
                y1[taken].detach(),
                [stage[taken].detach() for stage in stages],
            )

        taken = accept.long()
        active.nfe = active.nfe + (tableau.stages - 1)
        active.accepted = active.accepted + taken
        active.rejected = active.rejected + 1 - taken
        active.status = torch.where(finite, ARRIVED, NOT_FINITE)
        active.dt = _next_step(dt, ratio, active.previous, accept, tableau)
        active.previous = torch.where(accept, ratio.clamp(min=1e-4), active.previous)
        active.t = torch.where(accept, torch.where(final, t1, active.t + dt), active.t)
        active.fresh = ~accept if not tableau.fsal else torch.ones_like(accept)
        keep_new = functools.partial(_where_rows, accept, all_accepted)
        active.y = keep_new(y1, active.y)
        if tableau.fsal:
            active.k1 = keep_new(k_last, active.k1)
        if increment is not None:
            active.integral = active.integral + keep_new(increment, torch.zeros_like(increment))

        if all_arrived:
            done.append(active)
            break
        if any_arrived:
            done.append(active.select(_rows_where(arrived)))
            keep = _rows_where(~arrived)
            active, f = active.select(keep), _select(f, keep)

    return _assemble(done, replays, record)


def _where_rows(accept: Tensor, everywhere: bool, new: Tensor, old: Tensor) -> Tensor:
    return new if everywhere else torch.where(_column(accept, new), new, old)


def _next_step(dt, ratio, previous, accept, tableau) -> Tensor:
    """PI step size control (HNW II.4, Gustafsson's idea as in DOPRI5); plain I after a rejection."""
    exponent = 1.0 / tableau.error_order
    ratio = ratio.clamp(min=1e-10)
    growth = SAFETY * ratio.pow(-(exponent - 0.75 * PI_BETA)) * previous.pow(PI_BETA)
    shrink = (SAFETY * ratio.pow(-exponent)).clamp(max=1.0)
    factor = torch.where(accept, growth, shrink).clamp(MIN_FACTOR, MAX_FACTOR)
    # A trial that was not finite carries no information but that it was far too long.
    factor = torch.where(torch.isfinite(ratio), factor, torch.full_like(factor, 0.1))
    return dt * factor


def _rows_where(condition: Tensor) -> Tensor:
    return condition.nonzero(as_tuple=True)[0]


def _refresh(active: _Active, f: VectorField, evaluate, done: List[_Active], record: Optional[DenseOutput]):
    """Evaluates the derivative at the state of the rows where it is not known.

    Rows where it is not finite have nothing to integrate: they go to ``done`` as they are. The
    others are then evaluated without them, because a zero gradient times infinite activations would
    be NaN in the gradient of every shared parameter; a repetition that is not counted in NFE.
    """
    stale = _rows_where(~active.fresh)
    if len(stale) == 0:
        return active, f
    while True:
        part, field_of_part = active, f
        if len(stale) < len(active.rows):
            part, field_of_part = active.select(stale), _select(f, stale)
        k1 = evaluate(part.rows, field_of_part, part.t, part.y)
        finite = torch.isfinite(_Norm.rms(k1.detach(), part.weights))
        if finite.all():
            break
        part.nfe = part.nfe + 1
        part.status = torch.full_like(part.status, NOT_FINITE)
        lost = part.select(_rows_where(~finite))
        done.append(lost)
        if record is not None:
            y = lost.y.detach()
            record.add_line(lost.rows, lost.t, torch.ones_like(lost.t), y, y)
        stuck = torch.zeros_like(active.fresh).index_fill(0, stale[~finite], True)
        keep = _rows_where(~stuck)
        active, f = active.select(keep), _select(f, keep)
        stale = _rows_where(~active.fresh)
        if len(stale) == 0:
            return active, f
    if part is not active:
        k1 = active.k1.index_copy(0, stale, k1)
    active.k1 = k1
    active.nfe = active.nfe + (~active.fresh).long()
    active.fresh = torch.ones_like(active.fresh)
    return active, f


def _finish(active: _Active, t1: float, integrand, record: Optional[DenseOutput]) -> _Active:
    """One Euler step over the rest of the interval: its derivative is known and finite, so it cannot
    fail and costs nothing. The rows keep the status that brought them here."""
    rest = t1 - active.t
    before = active.y
    active.y = torch.addcmul(before, _column(rest, before), active.k1)
    if record is not None:
        record.add_line(active.rows, active.t, rest, before.detach(), active.y.detach())
    if integrand is not None:
        value = integrand(active.k1)
        active.integral = active.integral + _column(rest, value) * value
    return active


def _assemble(done: List[_Active], replays: Tensor, dense: Optional[DenseOutput]) -> Solution:
    """Puts the rows back into the order in which they came."""
    if len(done) == 1:
        whole = done[0]
        names = None
    else:
        names = torch.cat([part.rows for part in done]).argsort()

    def gather(name: str):
        if names is None:
            return getattr(whole, name)
        values = [getattr(part, name) for part in done]
        return None if values[0] is None else torch.cat(values).index_select(0, names)

    return Solution(
        y=gather("y"),
        nfe=gather("nfe"),
        accepted=gather("accepted"),
        rejected=gather("rejected"),
        status=gather("status"),
        t=gather("t"),
        dt=gather("dt"),
        nfe_backward=replays,
        integral=gather("integral"),
        dense=dense,
    )
