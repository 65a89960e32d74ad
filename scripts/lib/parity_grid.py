"""The cells of the parity study: what to train, how, and the file that keeps what came out."""

import dataclasses
import itertools
import json
import os
import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterable, List, Optional

#: All are equally wide, and those with a decoder have one layer of it.
_WIDTH = "--encoder-embed-dim 64 --decoder-embed-dim 64 --dropout 0"
_LAYERS = f"{_WIDTH} --encoder-ffn-embed-dim 128 --encoder-attention-heads 4 --encoder-normalize-before"
_STOCK = (
    f"--arch transformer {_LAYERS} --decoder-ffn-embed-dim 128 --decoder-attention-heads 4 "
    "--decoder-normalize-before --decoder-layers 1 --encoder-layers"
)
_TIED = "--arch node_encoder_parity_increment_layer_norm --node-solver euler --node-steps"
_ADAPTIVE = "--node-solver bosh3 --node-rtol 0.1 --node-atol 0.1"

#: Options of fairseq-train by the names of the study.
ARCHITECTURES: Dict[str, str] = {
    "lstm": (
        f"--arch lstm {_WIDTH} --encoder-hidden-size 64 --decoder-hidden-size 64 --decoder-out-embed-dim 64"
    ),
    **{f"transformer-{layers}": f"{_STOCK} {layers}" for layers in (1, 2, 4, 8)},
    **{f"tied-{steps}": f"{_TIED} {steps}" for steps in (2, 4, 8)},
    "node-composed": f"--arch node_encoder_parity {_ADAPTIVE}",
    "node-composed-norm": f"--arch node_encoder_parity_layer_norm {_ADAPTIVE}",
    "node-increment": f"--arch node_encoder_parity_increment {_ADAPTIVE}",
    "node-increment-norm": f"--arch node_encoder_parity_increment_layer_norm {_ADAPTIVE}",
    "node-transformer": f"--arch node_transformer_parity {_ADAPTIVE}",
}
MAX_LENGTHS = (2, 4, 8, 16, 32)
PENALTIES = ("none", "arclength", "kinetic")
WEIGHTS = (1e-3, 1e-2, 1e-1)
SEEDS = (1, 2, 3, 4, 5)
UPDATES = 10000
#: Lengths that models are looked at, up to twice those they were trained on.
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
BATCH = 64


def has_path(architecture: str) -> bool:
    """Whether there is a path through depth whose length can be penalised."""
    return not architecture.startswith(("lstm", "transformer"))


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        architecture: one of ``ARCHITECTURES``.
        max_length: bits of the longest strings trained on; the shortest have 1.
        penalty, weight: on the path; ``none`` and 0 for no penalty.
        seed: of the weights and of the strings.
        updates: of 64 strings each.
    """

    architecture: str
    max_length: int
    penalty: str
    weight: float
    seed: int
    updates: int

    @property
    def name(self) -> str:
        """Of its files: every field that tells one cell from another."""
        penalty = "" if self.penalty == "none" else f"_{self.penalty}-{self.weight:g}"
        return f"{self.architecture}_max-{self.max_length}{penalty}_seed-{self.seed}_updates-{self.updates}"

    def arguments(self, save_dir: Path) -> List[str]:
        """What to type after ``fairseq-train``."""
        criterion = "cross_entropy"
        if has_path(self.architecture):
            criterion += f"_with_path --path-penalty {self.penalty} --path-weight {self.weight:g}"
        # One epoch: every string of a training is new (short ones come again, of course).
        options = (
            f"--user-dir fairseq_node --task parity {ARCHITECTURES[self.architecture]} "
            f"--criterion {criterion} --parity-max-length {self.max_length} "
            f"--parity-train-size {self.updates * BATCH} --max-update {self.updates} --batch-size {BATCH} "
            f"--optimizer adam --lr 1e-3 --clip-norm 1 --seed {self.seed} --parity-seed {self.seed} "
            "--disable-validation --num-workers 0 --cpu --no-epoch-checkpoints "
            "--save-interval-updates 500 --keep-interval-updates 1 --log-format simple --log-interval 100"
        )
        return [*shlex.split(options), "--save-dir", str(save_dir)]


def grid(
    architectures: Iterable[str],
    max_lengths: Iterable[int],
    penalties: Iterable[str],
    weights: Iterable[float],
    seeds: Iterable[int],
    updates: int,
) -> List[Cell]:
    """All cells, first seeds first: stopped early, a study has all of the grid with fewer seeds.

    A model without a path has no penalty, and ``none`` no weight.
    """
    cells = {}
    for seed, max_length, architecture, penalty, weight in itertools.product(
        seeds, max_lengths, architectures, penalties, weights
    ):
        if penalty == "none":
            weight = 0.0
        elif not has_path(architecture) or weight == 0:
            continue
        cells[Cell(architecture, max_length, penalty, weight, seed, updates)] = None
    return list(cells)


def result_file(out: Path, cell: Cell) -> Path:
    return out / "cells" / f"{cell.name}.json"


def pending(out: Path, cells: Iterable[Cell]) -> List[Cell]:
    """The cells without a result."""
    return [cell for cell in cells if not result_file(out, cell).exists()]


def run_cell(cell: Cell, out: Path) -> Path:
    """Trains a model by fairseq's own ``main``, looks at it, and writes its result, whole or not at all.

    A training that was killed goes on from its last checkpoint; the checkpoints are removed at the end.
    That fairseq ends a training since its gradients are not finite is a result too: ``diverged`` with
    fairseq's words, and nothing seen at any length. What fairseq prints goes to a log.
    """
    target = result_file(out, cell)
    work = out / "work" / cell.name
    work.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    _print_to(out / "logs" / f"{cell.name}.log")
    start = time.perf_counter()
    diverged = _train(cell.arguments(work))
    result = {
        **dataclasses.asdict(cell),
        "seconds": round(time.perf_counter() - start, 1),
        "diverged": diverged,
    }
    result["lengths"] = [] if diverged else _look(work / "checkpoint_last.pt", cell.max_length)
    part = target.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1))
    os.replace(part, target)
    shutil.rmtree(work)
    return target


def _print_to(log: Path) -> None:
    """Everything that this process prints from now on."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def _train(arguments: List[str]) -> Optional[str]:
    """Runs ``fairseq-train`` in this process, which has imported it already; returns why it diverged."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq_cli.train import main

    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, input_args=arguments)
    try:
        main(convert_namespace_to_omegaconf(args))
    except FloatingPointError as error:
        return str(error)
    return None


def _look(checkpoint: Path, max_length: int) -> List[Dict]:
    from fairseq.checkpoint_utils import load_model_ensemble_and_task

    from lib.parity_diagnostics import diagnose

    (model,), _, task = load_model_ensemble_and_task([str(checkpoint)])
    lengths = [length for length in LENGTHS if length <= 2 * max_length]
    return [dataclasses.asdict(diagnose(task, model, length)) for length in lengths]
