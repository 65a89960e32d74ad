"""Keys and values that a decoder block keeps between the steps of incremental decoding.

On a fixed grid the n-th evaluation of the field always happens at the same time and stage, so every
evaluation has keys and values of its own and incremental decoding is exact. Appending all of them to
one cache, as a layer of a stock Transformer would, mixes the positions' states at different times.
"""

from __future__ import annotations

from typing import Dict, Optional, Tuple

import torch
from torch import Tensor


class EvaluationCache:
    """A cache per evaluation, in a dict of tensors with the batch dimension first.

    The dict is what fairseq's incremental state holds for the block, so that everything in it can be
    reordered with the beam. Create one of these for each new position: it counts the evaluations.
    """

    def __init__(self, state: Dict[str, Tensor]):
        self.state = state
        self.evaluation = 0

    def append(
        self, key: Tensor, value: Tensor, padding: Optional[Tensor]
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """Adds the new position to the current evaluation's keys and values, and moves to the next.

        Args:
            key, value: of the new position, ``(batch, heads, 1, head_dim)``.
            padding: whether the new token is padding, ``(batch, 1)``, or None.

        Returns:
            keys and values ``(batch, heads, length, head_dim)`` of all positions so far, and which of
            them are padding, ``(batch, length)`` (None if there never was any).
        """
        name = str(self.evaluation)
        before = self.state.get("key" + name)
        length = 0 if before is None else before.size(2)
        if before is not None:
            key = torch.cat([before, key], dim=2)
            value = torch.cat([self.state["value" + name], value], dim=2)
        self.state["key" + name], self.state["value" + name] = key, value
        paddings = self.state.get("padding" + name)
        if padding is not None or paddings is not None:
            blank = torch.zeros(key.size(0), length + 1, dtype=torch.bool, device=key.device)
            if paddings is not None:
                blank[:, :length] = paddings
            if padding is not None:
                blank[:, length:] = padding
            self.state["padding" + name] = paddings = blank
        self.evaluation += 1
        return key, value, paddings


def reorder(state: Dict[str, Tensor], new_order: Tensor) -> Dict[str, Tensor]:
    """The cache of the hypotheses ``new_order``, ``(batch,)``."""
    return {name: tensor.index_select(0, new_order) for name, tensor in state.items()}
