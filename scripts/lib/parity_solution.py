"""A Transformer of two layers that solves parity exactly at every length, its weights set by hand.

The construction of Chiang & Cholak (2022), "Overcoming a Theoretical Limitation of Self-Attention"
(arXiv 2202.12172) for fairseq's layers: no layer norm, ReLU, positions encoded by i / N and
(-1)^i. With k ones among N tokens, the first layer marks position k, the second asks whether it is even.
"""

import argparse
from typing import Tuple

import torch
from torch import Tensor, nn

from fairseq_node.tasks.parity import CLASSES, ParityTask

#: What the channels of the state hold. The last three lines are what the layers compute.
(
    IS_ONE,
    IS_END,
    PLACE,  # i / N
    SIGN,  # (-1)^i
    ONES,  # k / N
    UNIT,  # 1 / N
    MARK,  # [i = k] / N
    ANSWER,  # positive for even
) = range(8)
EMBED_DIM = 16
#: The second layer's heads look at even and odd positions as exp(+-SHARPNESS); any positive number will do.
SHARPNESS = 10.0
#: Of the logits. The answer shrinks like 1 / N^2, so that the loss rises with N: only its sign is exact.
SCALE = 1e5


class Positions(nn.Module):
    """``i / N`` and ``(-1)^i`` for the i-th of the N tokens of a sentence, i = 0, 1, ...; 0 for padding."""

    max_positions = 10**6

    def __init__(self, padding_idx: int):
        super().__init__()
        self.padding_idx = padding_idx

    def forward(self, tokens: Tensor) -> Tensor:
        """``(batch, length)`` to ``(batch, length, EMBED_DIM)``."""
        valid = tokens.ne(self.padding_idx)
        place = valid.cumsum(1) - 1
        features = torch.zeros(*tokens.shape, EMBED_DIM)
        features[..., PLACE] = place / valid.sum(1, keepdim=True)
        features[..., SIGN] = 1.0 - 2.0 * (place % 2)
        return features * valid.unsqueeze(-1)


@torch.no_grad()
def _set(layer: nn.Linear, entries: Tuple[Tuple[int, int, float], ...], bias=None) -> None:
    """All weights 0 but these, ``(output, input, value)``."""
    layer.weight.zero_()
    layer.bias.zero_()
    for row, column, value in entries:
        layer.weight[row, column] = value
    for row, value in (bias or {}).items():
        layer.bias[row] = value


def exact_model(task: ParityTask, **options):
    """A ``node_encoder`` of two Euler steps, that is two stock layers, that solves parity.

    Args:
        task: the parity task.
        options: of the model, over those that the construction needs.
    """
    needed = dict(
        encoder_layers=2,
        encoder_embed_dim=EMBED_DIM,
        encoder_ffn_embed_dim=4,
        encoder_attention_heads=2,
        decoder_embed_dim=EMBED_DIM,
        decoder_attention_heads=2,
        activation_fn="relu",
        no_scale_embedding=True,
        node_solver="euler",
        read_out="last",
    )
    args = argparse.Namespace(arch="node_encoder_parity_increment", **{**needed, **options})
    model = task.build_model(args)
    symbols, half = task.dictionary, EMBED_DIM // 2  # head 1 has the second half of the channels

    with torch.no_grad():
        embedding = model.encoder.embed_tokens.weight.zero_()
        embedding[symbols.index("1"), IS_ONE] = 1.0
        embedding[symbols.eos(), IS_END] = 1.0
    model.encoder.embed_positions = Positions(symbols.pad())

    mark, ask = model.encoder.layers
    # Attention to all tokens alike: the means k / N of the ones and 1 / N of the end.
    for projection in (mark.self_attn.q_proj, mark.self_attn.k_proj):
        _set(projection, ())
    _set(mark.self_attn.v_proj, ((0, IS_ONE, 1.0), (1, IS_END, 1.0)))
    _set(mark.self_attn.out_proj, ((ONES, 0, 1.0), (UNIT, 1, 1.0)))
    # With d = (k - i) / N: relu(d - 1/N) - 2 relu(d) + relu(d + 1/N) is 1/N at i = k and 0 elsewhere.
    differences = [((h, ONES, 1.0), (h, PLACE, -1.0), (h, UNIT, h - 1.0)) for h in range(3)]
    _set(mark.fc1, sum(differences, ()))
    _set(mark.fc2, ((MARK, 0, 1.0), (MARK, 1, -2.0), (MARK, 2, 1.0)))

    # Scores SHARPNESS * (-1)^i and its opposite; the mark is where the even head or the odd one looks.
    sharpness = SHARPNESS * half**0.5
    _set(ask.self_attn.q_proj, (), bias={0: sharpness, half: -sharpness})
    _set(ask.self_attn.k_proj, ((0, SIGN, 1.0), (half, SIGN, 1.0)))
    _set(ask.self_attn.v_proj, ((0, MARK, 1.0), (half, MARK, 1.0)))
    _set(ask.self_attn.out_proj, ((ANSWER, 0, 1.0), (ANSWER, half, -1.0)))
    _set(ask.fc1, ())
    _set(ask.fc2, ())

    even, odd = map(symbols.index, CLASSES)
    never = {row: -1e4 for row in range(len(symbols)) if row not in (even, odd)}
    _set(model.decoder.output_projection, ((even, ANSWER, SCALE), (odd, ANSWER, -SCALE)), bias=never)
    return model.eval()
