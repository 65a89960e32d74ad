#!/usr/bin/env python3
"""Times the solver: against stock layers, against bare evaluations of the field, against other solvers.

    python scripts/bench_solver.py [--quick] [--device cuda]

What is compared takes turns in one process, and medians of the turns are divided: the ratios mean
something on a machine that others use, the times do not. Forward and backward where nothing else is said.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Optional

import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fairseq_node.modules import solver  # noqa: E402
from fairseq_node.modules.node_layer import NodeDecoderLayer, NodeEncoderLayer  # noqa: E402
from fairseq_node.modules.solver import SolverConfig  # noqa: E402
from fairseq_node.modules.vector_field import FieldConfig  # noqa: E402


@dataclass
class Bench:
    """Sizes of what is timed."""

    embed_dim: int
    batch: int
    length: int
    repeats: int
    device: str

    def config(self) -> TransformerConfig:
        cfg = TransformerConfig()
        for side in (cfg.encoder, cfg.decoder):
            side.embed_dim, side.ffn_embed_dim = self.embed_dim, 4 * self.embed_dim
            side.attention_heads, side.normalize_before = max(self.embed_dim // 64, 1), True
        cfg.dropout = 0.0
        return cfg

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(self.device)

    def states(self) -> torch.Tensor:
        """``(length, batch, embed_dim)``."""
        return self.tensor(self.length, self.batch, self.embed_dim)

    def encoder(self, **options) -> NodeEncoderLayer:
        torch.manual_seed(1)
        return NodeEncoderLayer(self.config(), FieldConfig(), SolverConfig(**options)).to(self.device)

    def seconds(self, what: str, **runs: Callable[[], object]) -> Dict[str, float]:
        """Median seconds of functions that take turns."""
        taken: Dict[str, List[float]] = {name: [] for name in runs}
        for turn in tqdm(range(self.repeats + 1), desc=what, leave=False):
            for name, run in runs.items():
                self.wait()
                start = time.perf_counter()
                run()
                self.wait()
                if turn:  # the first one warms up
                    taken[name].append(time.perf_counter() - start)
        return {name: statistics.median(values) for name, values in taken.items()}

    def wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def both_ways(layer: Callable, x: torch.Tensor, **others) -> Callable[[], None]:
    """Forward and backward through a layer; ``x`` gets a gradient."""

    def run():
        leaf = x.detach().requires_grad_()
        layer(leaf, **others)[0].sum().backward()

    return run


def against_stock(bench: Bench) -> List[tuple]:
    """One Euler step against fairseq's layer with the same weights."""
    cfg, x = bench.config(), bench.states()
    rows = []
    future = torch.full((bench.length, bench.length), float("-inf"), device=bench.device).triu(1)
    alone = dict(encoder_padding_mask=None)
    for name, stock, node, more in (
        ("encoder", TransformerEncoderLayerBase(cfg), bench.encoder(solver="euler"), alone),
        (
            "decoder",
            TransformerDecoderLayerBase(cfg),
            NodeDecoderLayer(cfg, FieldConfig(), SolverConfig(solver="euler")),
            dict(encoder_out=x, self_attn_mask=future, **alone),
        ),
    ):
        stock, node = stock.to(bench.device), node.to(bench.device)
        node.load_state_dict(stock.state_dict(), strict=False)
        taken = bench.seconds(name, stock=both_ways(stock, x, **more), node=both_ways(node, x, **more))
        rows.append((f"{name} block, 1 Euler step / stock layer", taken["node"] / taken["stock"], 1.00))
    return rows


def bare(bench: Bench, layer: NodeEncoderLayer):
    """The layer's field and a state of ``(batch, length, embed_dim)``."""
    y = bench.states().transpose(0, 1).contiguous()
    return layer.bind(y, None), y


def overhead(bench: Bench) -> List[tuple]:
    """Solves against as many evaluations of the field as they made."""
    return [
        against_evaluations(bench, solver="rk4", steps=2),
        against_evaluations(bench, solver="bosh3", rtol=1e-2, atol=1e-2),
        against_evaluations(bench, solver="dopri5", rtol=1e-3, atol=1e-3),
    ]


@torch.no_grad()
def against_evaluations(bench: Bench, **options) -> tuple:
    layer = bench.encoder(**options)
    field, y = bare(bench, layer)
    t = torch.zeros(bench.batch, device=bench.device)
    # The same sentence everywhere, so that none leaves the batch.
    y = y[:1].expand_as(y).contiguous()
    nfe = int(solver.solve(field, y, layer.solver_config).nfe.max())
    taken = bench.seconds(
        options["solver"],
        solve=lambda: solver.solve(field, y, layer.solver_config),
        evaluations=lambda: [field(t, y) for _ in range(nfe)],
    )
    return (
        f"{options['solver']} solve / its {nfe} evaluations, forward",
        taken["solve"] / taken["evaluations"],
        1.05,
    )


class Scaled:
    """A field that is faster for some sentences than for others."""

    def __init__(self, field, speed: torch.Tensor):
        self.field, self.speed = field, speed

    def __call__(self, t, y):
        return self.speed.view(-1, 1, 1) * self.field(t, y)

    def select(self, rows):
        return Scaled(self.field.select(rows), self.speed[rows])


def active_set(bench: Bench) -> List[tuple]:
    """Sentences that need different numbers of evaluations, against their mean number."""
    layer = bench.encoder(solver="bosh3", rtol=1e-3, atol=1e-3, max_nfe=10_000)
    field, y = bare(bench, layer)
    speed = torch.linspace(1, 4, bench.batch, device=bench.device)
    t = torch.zeros(bench.batch, device=bench.device)
    scaled = Scaled(field, speed)
    with torch.no_grad():
        nfe = solver.solve(scaled, y, layer.solver_config).nfe
        evaluations = round(float(nfe.float().mean()))
        taken = bench.seconds(
            "active set",
            solve=lambda: solver.solve(scaled, y, layer.solver_config),
            evaluations=lambda: [scaled(t, y) for _ in range(evaluations)],
        )
    name = f"batch of {int(nfe.min())} to {int(nfe.max())} evaluations / their mean of {evaluations}, forward"
    return [(name, taken["solve"] / taken["evaluations"], 1.15)]


def saved_bytes(run: Callable[[], object]) -> int:
    """Bytes that autograd keeps between forward and backward, each storage once."""
    kept: Dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sum(kept.values())


def gradients(bench: Bench) -> List[tuple]:
    """Checkpoint against backprop: time, and memory as the number of evaluations grows."""
    x, rows, memory = bench.states(), [], {}
    layers = {
        mode: bench.encoder(solver="rk4", steps=3, gradient=mode) for mode in ("backprop", "checkpoint")
    }
    taken = bench.seconds(
        "checkpoint",
        **{mode: both_ways(layer, x, encoder_padding_mask=None) for mode, layer in layers.items()},
    )
    rows.append(("checkpoint / backprop, 12 evaluations", taken["checkpoint"] / taken["backprop"], 1.35))
    state = x.numel() * x.element_size()
    for mode in layers:
        for nfe in (10, 50, 200):
            layer = bench.encoder(solver="euler", steps=nfe, gradient=mode)
            memory[mode, nfe] = saved_bytes(lambda layer=layer: layer(x.requires_grad_(), None))
        grown = memory[mode, 200] - memory[mode, 10]
        what = f"{mode}: memory per further Euler step, in states of the block"
        rows.append((what, grown / 190 / state, 1.0 if mode == "checkpoint" else None))
    return rows


def others(bench: Bench) -> List[tuple]:
    """torchdiffeq and torchode on the same field and tolerance; forward."""
    layer = bench.encoder(solver="dopri5", rtol=1e-3, atol=1e-3).requires_grad_(False)
    field, y = bare(bench, layer)
    runs = {"ours": lambda: solver.solve(field, y, layer.solver_config)}
    batch_wide = SolverConfig(solver="dopri5", rtol=1e-3, atol=1e-3, step_control="batch")
    runs["torchdiffeq"] = lambda: solver.solve(field, y, batch_wide)
    other = torchode_solver(field, y)
    if other is not None:
        runs["torchode"] = other
    with torch.no_grad():
        taken = bench.seconds("others", **runs)
    return [
        (f"{name} / ours, dopri5 at 1e-3, forward", taken[name] / taken["ours"], None)
        for name in list(runs)[1:]
    ]


def torchode_solver(field, y) -> Optional[Callable]:
    """The same solve by torchode, if it is installed."""
    try:
        import torchode
    except ImportError:
        return None
    shape = y.shape
    term = torchode.ODETerm(lambda t, flat: field(t, flat.view(shape)).flatten(1))
    stepper = torchode.AutoDiffAdjoint(
        torchode.Dopri5(term=term), torchode.IntegralController(atol=1e-3, rtol=1e-3, term=term)
    )
    zeros = torch.zeros(len(y), device=y.device)
    problem = torchode.InitialValueProblem(
        y0=y.flatten(1), t_start=zeros, t_end=zeros + 1, t_eval=torch.stack([zeros, zeros + 1], dim=1)
    )
    return lambda: stepper.solve(problem)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = dict(type=int, metavar="N")
    parser.add_argument("--embed-dim", default=512, help="default: 512", **numbers)
    parser.add_argument("--batch", default=40, help="sentences (default: 40)", **numbers)
    parser.add_argument("--length", default=50, help="tokens of each (default: 50)", **numbers)
    parser.add_argument("--repeats", default=7, help="turns of each measurement (default: 7)", **numbers)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="64 channels, 3 turns: whether it runs")
    args = parser.parse_args(argv)
    bench = Bench(args.embed_dim, args.batch, args.length, args.repeats, args.device)
    if args.quick:
        bench = Bench(64, 6, 10, 3, args.device)
    print(
        f"{bench.batch} sentences of {bench.length} tokens, d = {bench.embed_dim}, {bench.device}, "
        f"torch {torch.__version__}, threads: {torch.get_num_threads()}, medians of {bench.repeats}\n"
    )
    print("| | ratio | aim |\n|---|---:|---:|")
    for part in (against_stock, overhead, gradients, active_set, others):
        for name, ratio, aim in part(bench):
            print(f"| {name} | {ratio:.2f} | " + ("" if aim is None else f"<= {aim:.2f}") + " |", flush=True)


if __name__ == "__main__":
    main()
