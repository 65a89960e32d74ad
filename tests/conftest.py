"""Small models and batches that the tests share."""

import argparse

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import build_model

import fairseq_node  # noqa: F401 (registers the architectures)

WORDS = 30


@pytest.fixture(scope="session")
def dictionary():
    words = Dictionary()
    for number in range(WORDS):
        words.add_symbol(f"w{number}")
    return words


@pytest.fixture
def build(dictionary):
    """Builds a small model: ``build("node_transformer", node_solver="rk4")``."""

    class Task:
        source_dictionary = target_dictionary = dictionary

    def make(arch, seed=0, dtype=torch.float32, **options):
        defaults = dict(
            encoder_embed_dim=32,
            encoder_ffn_embed_dim=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_normalize_before=True,
            decoder_normalize_before=True,
            dropout=0.0,
        )
        torch.manual_seed(seed)
        args = argparse.Namespace(arch=arch, **{**defaults, **options})
        return build_model(args, Task).to(dtype)

    return make


@pytest.fixture
def sample(dictionary):
    """Makes a batch like fairseq's: sources padded on the left (or right), targets on the right."""
    pad, eos = dictionary.pad(), dictionary.eos()

    def make(src_lengths=(7, 5, 3, 6), tgt_lengths=(6, 4, 5, 2), left_pad=True, extra_pad=0, seed=0):
        generator = torch.Generator().manual_seed(seed)
        width = max(src_lengths) + extra_pad
        source = torch.full((len(src_lengths), width), pad)
        target = torch.full((len(tgt_lengths), max(tgt_lengths) + extra_pad), pad)
        previous = target.clone()
        for row, (length, tgt_length) in enumerate(zip(src_lengths, tgt_lengths)):
            words = torch.randint(4, 4 + WORDS, (length,), generator=generator)
            words[-1] = eos
            source[row, slice(width - length, None) if left_pad else slice(length)] = words
            words = torch.randint(4, 4 + WORDS, (tgt_length,), generator=generator)
            words[-1] = eos
            target[row, :tgt_length] = words
            previous[row, 0], previous[row, 1:tgt_length] = eos, words[:-1]
        return {
            "net_input": {
                "src_tokens": source,
                "src_lengths": torch.tensor(src_lengths),
                "prev_output_tokens": previous,
            },
            "target": target,
            "ntokens": sum(tgt_lengths),
        }

    return make
