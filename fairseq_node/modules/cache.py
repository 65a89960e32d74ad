"""Keys and values that a decoder block keeps between the steps of incremental decoding.

* On a fixed grid the n-th evaluation of the field always happens at the same time and stage, so every
  evaluation has keys and values of its own and incremental decoding is exact (:class:`EvaluationCache`).
  Appending all of them to one cache, as a layer of a stock Transformer would, mixes the positions'
  states at different times.
* An adaptive solve chooses its times, and chooses others for every position. The keys and values of
  earlier positions are stored at a few times and interpolated in between (:class:`DepthCache`).

Both keep what they know in a dict of tensors with the batch dimension first. The dict is what fairseq's
incremental state holds for the block, so that everything in it can be reordered with the beam.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor

from fairseq_node.modules.solver import InvalidOption

DECODE = ("cached", "exact")


@dataclass(frozen=True)
class DecodeConfig:
    """How a block decodes position after position with an adaptive solver; fixed grids are exact anyway.

    Attributes:
        decode: "cached" solves the new position alone, between keys and values of earlier positions
            that are interpolated in t; "exact" solves the whole prefix again.
        decode_nodes: how many times of an interval the keys and values are kept at, >= 2. Measured with
            ``scripts/bench_decode.py``: with 8 the error of the interpolation is below that of the solver
            at tolerances of 1e-3 and more.

    Raises:
        InvalidOption: naming the field and what to use instead.
    """

    decode: str = "cached"
    decode_nodes: int = 8

    def __post_init__(self):
        if self.decode not in DECODE:
            raise InvalidOption("decode", f"is {self.decode!r}; use one of {', '.join(DECODE)}")
        if self.decode_nodes < 2:
            raise InvalidOption("decode_nodes", f"is {self.decode_nodes}; use 2 or more, such as 8")


class EvaluationCache:
    """A cache per evaluation, for fixed grids.

    Create one of these for each new position: it counts the evaluations.
    """

    def __init__(self, state: Dict[str, Tensor]):
        self.state = state
        self.evaluation = 0

    @property
    def length(self) -> int:
        """How many positions there are already."""
        return self.state["key0"].size(2) if "key0" in self.state else 0

    def extended(
        self, t: Tensor, key: Tensor, value: Tensor, padding: Optional[Tensor]
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """Adds the new position to the current evaluation's keys and values, and moves to the next.

        Args:
            t: the time of the evaluation, ``(batch,)``; it is the same for every position.
            key, value: of the new position, ``(batch, heads, 1, head_dim)``.
            padding: whether the new token is padding, ``(batch, 1)``, or None.

        Returns:
            keys and values ``(batch, heads, length, head_dim)`` of all positions so far, and which of
            them are padding, ``(batch, length)`` (None if there never was any).
        """
        n = self.evaluation
        if f"key{n}" in self.state:
            key = torch.cat([self.state[f"key{n}"], key], dim=2)
            value = torch.cat([self.state[f"value{n}"], value], dim=2)
        self.state[f"key{n}"], self.state[f"value{n}"] = key, value
        if n == 0:
            _extend_padding(self.state, padding, key)
        self.evaluation += 1
        return key, value, self.state.get("padding")


def chebyshev_nodes(nodes: int, time: float, dtype: torch.dtype, device=None) -> Tensor:
    """Chebyshev points of the second kind on [0, time], ascending, both ends included, ``(nodes,)``."""
    angles = torch.linspace(0, math.pi, nodes, dtype=dtype, device=device)
    points = 0.5 * time * (1 - angles.cos())
    points[-1] = time  # not a rounding error away from it
    return points


def barycentric_weights(t: Tensor, nodes: Tensor) -> Tensor:
    """Weights of the values at Chebyshev points of the second kind in the polynomial through them.

    Args:
        t: where to interpolate, of any shape.
        nodes: the points, ``(nodes,)``.

    Returns:
        one more dimension, ``(..., nodes)``, that sums to 1. Source: Berrut & Trefethen 2004,
        Barycentric Lagrange Interpolation, eq. 4.2 and 5.4.
    """
    signs = 1.0 - 2.0 * (torch.arange(len(nodes), device=nodes.device) % 2).to(nodes.dtype)
    signs[0], signs[-1] = 0.5 * signs[0], 0.5 * signs[-1]
    difference = t.unsqueeze(-1) - nodes
    hit = difference == 0
    weights = signs / torch.where(hit, torch.ones_like(difference), difference)
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.where(hit.any(-1, keepdim=True), hit.to(weights.dtype), weights)


class DepthCache:
    """Keys and values of earlier positions as functions of t, for adaptive solvers.

    What has been decoded is moved once per position: the beam's order is kept until then, and the place
    of the new position is made on the way. Create one of these for each new position.

    Args:
        state: what the block keeps; see the module.
        nodes: the times at which keys and values are kept, ``(nodes,)``.
    """

    def __init__(self, state: Dict[str, Tensor], nodes: Tensor):
        self.state = state
        self.nodes = nodes
        self.padding = state.get("padding")
        self.length = 0
        # (batch, nodes, 2, heads, length + 1, head_dim): one product interpolates keys and values, and
        # the new position's are written into the last place.
        self.past = None
        self.ready: List[Tensor] = []
        self.begun = False
        if "past" in state:
            past, order = state["past"], state.pop("order", None)
            self.length = past.size(4)
            batch = len(past) if order is None else len(order)
            self.past = past.new_empty(batch, *past.shape[1:4], self.length + 1, past.size(5))
            self.past[..., -1:, :] = 0
            if order is None:
                self.past[..., :-1, :].copy_(past)
            else:
                torch.index_select(past, 0, order, out=self.past[..., :-1, :])

    def select(self, rows: Tensor) -> DepthCache:
        """The same cache for some sentences, to be read only."""
        part = DepthCache({}, self.nodes)
        part.length = self.length
        part.past = None if self.past is None else self.past.index_select(0, rows)
        part.padding = None if self.padding is None else self.padding.index_select(0, rows)
        return part

    def ahead(self, times: Tensor) -> DepthCache:
        """Prepares for evaluations at these times, ``(batch, times)``, in this order: all that is stored
        is read once for all of them."""
        part = DepthCache({}, self.nodes)
        part.length, part.past, part.padding = self.length, self.past, self.padding
        if self.past is not None:
            weights = barycentric_weights(times, self.nodes).to(self.past.dtype)
            part.ready = list(torch.bmm(weights, self.past.flatten(2)).unbind(1))
        return part

    def extended(
        self, t: Tensor, key: Tensor, value: Tensor, padding: Optional[Tensor]
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """Keys and values of earlier positions at time ``t``, and those of the new position.

        Args and returns: see :meth:`EvaluationCache.extended`; ``t`` is each sentence's own.
        """
        if self.past is None:
            return key, value, padding
        if not self.ready:
            if not self.begun and (t == self.nodes[0]).all():
                self.ready = [self.past[:, 0].flatten(1)]  # where every solve begins: nothing to interpolate
            else:
                self.ready = self.ahead(t.unsqueeze(1)).ready
        self.begun = True
        keys, values = self.ready.pop(0).view(len(key), *self.past.shape[2:]).unbind(1)
        keys[:, :, -1], values[:, :, -1] = key[:, :, 0], value[:, :, 0]
        if padding is not None or self.padding is not None:
            padding = _joined_padding(self.padding, padding, len(key), self.length, key.device)
        return keys, values, padding

    def store(self, keys: Tensor, values: Tensor, padding: Optional[Tensor]) -> None:
        """Keeps a position that has been solved.

        Args:
            keys, values: at the nodes, ``(batch, nodes, heads, 1, head_dim)``.
            padding: whether its token is padding, ``(batch, 1)``, or None.
        """
        new = torch.stack([keys, values], dim=2)
        if self.past is None:
            self.past = new
        else:
            self.past[..., -1:, :] = new
        self.state["past"] = self.past
        _extend_padding(self.state, padding, self.past)


def _extend_padding(state: Dict[str, Tensor], padding: Optional[Tensor], keys: Tensor) -> None:
    """Notes whether the newest of ``keys`` ``(batch, ..., length, head_dim)`` is padding."""
    before = state.get("padding")
    if padding is not None or before is not None:
        state["padding"] = _joined_padding(before, padding, keys.size(0), keys.size(-2) - 1, keys.device)


def _joined_padding(before, new, batch: int, length: int, device) -> Tensor:
    """``(batch, length + 1)``; None stands for no padding at all."""
    if before is None:
        before = torch.zeros(batch, length, dtype=torch.bool, device=device)
    if new is None:
        new = torch.zeros(batch, 1, dtype=torch.bool, device=device)
    return torch.cat([before, new], dim=1)


def reorder(state: Dict[str, Tensor], new_order: Tensor) -> Dict[str, Tensor]:
    """The cache of the hypotheses ``new_order``, ``(batch,)``.

    Where hypotheses share the keys and values of one source (``beam`` of them), they stay together, as
    they do in fairseq's search.
    """
    beam = state.get("beam", 1)
    moved = {}
    for name, kept in state.items():
        if name == "beam":
            moved[name] = kept
        elif name == "past":  # much larger than the rest: a DepthCache moves it when it makes room
            moved[name] = kept
            moved["order"] = state["order"].index_select(0, new_order) if "order" in state else new_order
        elif name.startswith("cross"):
            if len(kept) * beam == len(new_order) and beam > 1:
                moved[name] = kept
            else:
                moved[name] = kept.index_select(0, new_order[::beam] // beam)
        elif name != "order":
            moved[name] = kept.index_select(0, new_order)
    return moved
