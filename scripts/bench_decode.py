#!/usr/bin/env python3
"""Times beam search: stock fairseq, fixed grids, and adaptive solvers with either --node-decode.

    python scripts/bench_decode.py [--lengths 10,30,100] [--repeats 3]

All models have the same random weights, translate the same sources and are made to write hypotheses of
a given length. They take turns in one process, so the ratios of the medians mean something where the
times do not. Another question is how many nodes the cache needs; it takes a trained model:

    python scripts/bench_decode.py --nodes CHECKPOINT DATA-BIN

compares the log-probabilities of the validation set, decoded position by position, with those of many
nodes, next to what the solver's own tolerance costs.
"""

import argparse
import logging
import statistics
import sys
import time
from pathlib import Path

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.models import build_model
from fairseq.sequence_generator import SequenceGenerator
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fairseq_node  # noqa: E402, F401

STOCK = "stock transformer"
CACHED, EXACT = "bosh3 0.1, cached", "bosh3 0.1, exact"
#: The rows of the table: architecture and options.
VARIANTS = {
    STOCK: ("transformer", {}),
    "euler, 1 step": ("node_transformer", dict(node_solver="euler")),
    "rk4, 1 step": ("node_transformer", dict(node_solver="rk4")),
    CACHED: ("node_transformer", dict(node_solver="bosh3", node_rtol=0.1, node_atol=0.1)),
    EXACT: ("node_transformer", dict(node_solver="bosh3", node_rtol=0.1, node_atol=0.1, node_decode="exact")),
}


def build(words: Dictionary, embed_dim: int, layers: int, device: str) -> dict:
    """A model for each of ``VARIANTS``, all with the same weights."""

    class Task:
        source_dictionary = target_dictionary = words

    models = {}
    for name, (arch, options) in VARIANTS.items():
        args = argparse.Namespace(
            arch=arch,
            encoder_layers=layers,
            decoder_layers=layers,
            encoder_embed_dim=embed_dim,
            decoder_embed_dim=embed_dim,
            encoder_ffn_embed_dim=4 * embed_dim,
            decoder_ffn_embed_dim=4 * embed_dim,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_normalize_before=True,
            decoder_normalize_before=True,
            share_all_embeddings=True,
            **options,
        )
        torch.manual_seed(1)
        model = build_model(args, Task)
        if models:
            model.load_state_dict(models[STOCK].state_dict(), strict=False)
        models[name] = model.to(device).eval()
    return models


def measure(
    models: dict, words: Dictionary, length: int, batch: int, beam: int, repeats: int, device: str
) -> dict:
    """Median seconds that each model needs for hypotheses of ``length`` tokens; they take turns."""
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(words.nspecial, len(words), (batch, length), generator=generator).to(device)
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.full((batch,), length, device=device)}}
    seconds = {name: [] for name in models}
    for turn in tqdm(range(repeats + 1), desc=f"length {length}", leave=False):
        for name, model in models.items():
            search = SequenceGenerator([model], words, beam_size=beam, max_len_b=length, min_len=length)
            start = time.perf_counter()
            search.generate([model], sample)
            if device != "cpu":
                torch.cuda.synchronize()
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def speeds(args) -> None:
    words = Dictionary()
    for number in range(args.words):
        words.add_symbol(f"w{number}")
    models = build(words, args.embed_dim, args.layers, args.device)
    print(
        f"d = {args.embed_dim}, {args.layers}+{args.layers} blocks, {args.batch} sentences, "
        f"beam {args.beam}, {args.device}, torch {torch.__version__}, threads: {torch.get_num_threads()}; "
        "tokens per second, and the speed against the stock model\n"
    )
    print("| |" + "".join(f" {length} tokens |" for length in args.lengths) + " against exact |")
    print("|---|" + "---:|" * (len(args.lengths) + 1))
    table = {
        length: measure(models, words, length, args.batch, args.beam, args.repeats, args.device)
        for length in args.lengths
    }
    for name in models:
        cells = [
            f"{args.batch * length / seconds[name]:,.0f} ({seconds[STOCK] / seconds[name]:.2f} x)"
            for length, seconds in table.items()
        ]
        last = table[args.lengths[-1]]
        print(f"| {name} | " + " | ".join(cells) + f" | {last[EXACT] / last[name]:.1f} x |")


@torch.no_grad()
def node_errors(checkpoint: str, data: str, sentences: int) -> None:
    """Prints root mean square differences of log-probabilities, see the module."""

    def decode(**options):
        models, _, task = checkpoint_utils.load_model_ensemble_and_task(
            [checkpoint], arg_overrides={"data": data, "node_max_nfe": 10_000, **options}
        )
        task.load_dataset("valid")
        dataset = task.dataset("valid")
        batch = dataset.collater([dataset[n] for n in range(min(sentences, len(dataset)))])
        model, net_input = models[0].eval(), batch["net_input"]
        encoder_out = model.encoder(net_input["src_tokens"], src_lengths=net_input["src_lengths"])
        state, steps = {}, []
        for length in range(1, batch["target"].size(1) + 1):
            previous = net_input["prev_output_tokens"][:, :length]
            output = model.decoder(previous, encoder_out=encoder_out, incremental_state=state)
            steps.append(model.get_normalized_probs(output, log_probs=True))
        return torch.cat(steps, dim=1)[batch["target"].ne(task.target_dictionary.pad())]

    def rms(one, other):
        return f"{(one - other).square().mean().sqrt():.1e}"

    logging.disable(logging.INFO)
    counts, many = (3, 4, 6, 8, 12, 16), 32
    reference = decode(node_solver="dopri5", node_rtol=1e-6, node_atol=1e-6, node_decode_nodes=many)
    print("root mean square error of the log-probabilities: of the solver, and of the interpolation\n")
    print("| solver, tolerance | solver |" + "".join(f" {count} nodes |" for count in counts))
    print("|---|---:|" + "---:|" * len(counts))
    for name in ("heun_euler", "bosh3", "dopri5"):
        for tolerance in (1e-1, 1e-2, 1e-3):
            options = dict(node_solver=name, node_rtol=tolerance, node_atol=tolerance)
            best = decode(**options, node_decode_nodes=many)
            cells = [rms(decode(**options, node_decode_nodes=count), best) for count in counts]
            print(
                f"| {name}, {tolerance:g} | {rms(best, reference)} | " + " | ".join(cells) + " |", flush=True
            )


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = dict(type=int, metavar="N")
    parser.add_argument(
        "--lengths",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[10, 30, 100],
        help="of the hypotheses, in tokens (default: 10,30,100)",
    )
    parser.add_argument("--embed-dim", default=256, help="default: 256", **numbers)
    parser.add_argument("--layers", default=1, help="of encoder and of decoder (default: 1)", **numbers)
    parser.add_argument("--words", default=4000, help="in the vocabulary (default: 4000)", **numbers)
    parser.add_argument("--batch", default=16, help="sentences (default: 16)", **numbers)
    parser.add_argument("--beam", default=4, help="default: 4", **numbers)
    parser.add_argument("--repeats", default=3, help="of each measurement (default: 3)", **numbers)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--nodes", nargs=2, metavar=("CHECKPOINT", "DATA-BIN"), help="see above")
    parser.add_argument("--sentences", default=64, help="that --nodes decodes (default: 64)", **numbers)
    args = parser.parse_args(argv)
    if args.nodes:
        node_errors(*args.nodes, args.sentences)
    else:
        speeds(args)


if __name__ == "__main__":
    main()
