"""What the criterion's statistics cost, as a part of a training step.

Two criteria take turns on the same batches, with and without statistics; what they leave out is what
`_statistics` computes and what the log makes of it. Prints the median of the pairs' differences.

    python scripts/bench_statistics.py [--steps 40] [--embed-dim 256] [--sentences 32] [--tokens 25]
"""

import argparse
import statistics
import time
import types

import torch
from fairseq.data import Dictionary
from fairseq.logging import metrics
from fairseq.models import build_model
from tqdm import tqdm

from fairseq_node.criterions import with_path


def make(arguments):
    """A model, its criterion, and a batch."""
    words = Dictionary()
    for number in range(1000):
        words.add_symbol(f"w{number}")
    task = types.SimpleNamespace(source_dictionary=words, target_dictionary=words)
    options = argparse.Namespace(
        arch="node_transformer",
        encoder_embed_dim=arguments.embed_dim,
        encoder_ffn_embed_dim=4 * arguments.embed_dim,
        encoder_layers=arguments.layers,
        decoder_layers=arguments.layers,
        encoder_normalize_before=True,
        decoder_normalize_before=True,
        node_solver="bosh3",
    )
    torch.manual_seed(1)
    model = build_model(options, task).to(arguments.device).train()
    criterion = with_path.LabelSmoothedCrossEntropyWithPath(task, False, 0.1, "none", 0.0, "both", "token", 0)
    shape = (arguments.sentences, arguments.tokens)
    tokens = torch.randint(4, 1000, shape, device=arguments.device)
    lengths = torch.full((arguments.sentences,), arguments.tokens, device=arguments.device)
    net_input = {"src_tokens": tokens, "src_lengths": lengths, "prev_output_tokens": tokens}
    return model, criterion, {"net_input": net_input, "target": tokens, "ntokens": tokens.numel()}


def step(model, criterion, sample):
    """One forward and backward, and what the log makes of it; seconds."""
    if sample["target"].is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    model.zero_grad()
    torch.manual_seed(1)  # the same dropout, and so the same NFE
    loss, _, log = criterion(model, sample)
    loss.backward()
    with metrics.aggregate() as aggregator:
        criterion.reduce_metrics([log])
    aggregator.get_smoothed_values()
    if sample["target"].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="pairs of steps. Default: 40")
    parser.add_argument("--embed-dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2, help="blocks of encoder and of decoder. Default: 2")
    parser.add_argument("--sentences", type=int, default=32, help="sentences of a batch. Default: 32")
    parser.add_argument("--tokens", type=int, default=25, help="tokens of a sentence. Default: 25")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    model, criterion, sample = make(arguments)
    with_statistics = with_path._statistics
    without_statistics = lambda *_, **__: {}  # noqa: E731
    pairs = []
    for number in tqdm(range(arguments.steps + 2), desc="pairs of steps"):
        pair = {}
        for compute in (with_statistics, without_statistics)[:: 1 if number % 2 else -1]:
            with_path._statistics = compute
            pair[compute is with_statistics] = step(model, criterion, sample)
        if number >= 2:  # the first ones warm up
            pairs.append(pair)
    plain = statistics.median(pair[False] for pair in pairs)
    added = statistics.median(pair[True] - pair[False] for pair in pairs)
    print(f"a step: {1000 * plain:.2f} ms; statistics: {1000 * added:+.3f} ms, {100 * added / plain:+.2f} %")


if __name__ == "__main__":
    main()
