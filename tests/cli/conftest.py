"""A small corpus, and fairseq's commands as a user types them."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = "alpha beta gamma delta epsilon zeta eta theta".split()


class Commands:
    """Runs commands in subprocesses, with the folder of the checkout as the working directory."""

    def environment(self):
        paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
        return {**os.environ, "PATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def start(self, command, *arguments, cwd=ROOT, **options):
        return subprocess.Popen(
            [command, *map(str, arguments)], cwd=cwd, env=self.environment(), text=True, **options
        )

    def fails(self, command, *arguments, **options):
        """Runs a command that must fail, and returns what it said."""
        return self(command, *arguments, expect_failure=True, **options)

    def __call__(self, command, *arguments, cwd=ROOT, stdin=None, expect_failure=False):
        done = subprocess.run(
            [command, *map(str, arguments)],
            cwd=cwd,
            env=self.environment(),
            text=True,
            input=stdin,
            capture_output=True,
            timeout=600,
        )
        output = done.stderr + done.stdout
        if (done.returncode != 0) != expect_failure:
            typed = " ".join(map(str, (command, *arguments)))
            pytest.fail(f"{typed}\nexit status {done.returncode}\n{output[-4000:]}", pytrace=False)
        return output


@pytest.fixture(scope="session")
def run():
    return Commands()


@pytest.fixture(scope="session")
def corpus(run, tmp_path_factory):
    """data-bin of sentences of English words, to be reversed and written in capitals."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(0)
    for split, size in (("train", 300), ("valid", 20), ("test", 20)):
        lines = [[generator.choice(WORDS) for _ in range(generator.randint(1, 7))] for _ in range(size)]
        (folder / f"{split}.en").write_text("".join(" ".join(line) + "\n" for line in lines))
        (folder / f"{split}.de").write_text(
            "".join(" ".join(reversed(line)).upper() + "\n" for line in lines)
        )
    pairs = [option for split in ("train", "valid", "test") for option in (f"--{split}pref", folder / split)]
    run(
        *("fairseq-preprocess", "-s", "en", "-t", "de", "--joined-dictionary"),
        *("--destdir", folder / "bin", *pairs),
    )
    return folder / "bin"


@pytest.fixture(scope="session")
def training(corpus):
    """Arguments of fairseq-train for a tiny model; the last of repeated options wins."""

    def arguments(save_dir, *more, arch="node_transformer_tiny"):
        criterion = "label_smoothed_cross_entropy" + ("_with_path" if arch.startswith("node") else "")
        return [
            *(corpus, "--user-dir", "fairseq_node", "--task", "translation", "--arch", arch),
            *("--encoder-normalize-before", "--decoder-normalize-before", "--share-all-embeddings"),
            *("--encoder-layers", 1, "--decoder-layers", 1, "--dropout", 0.1, "--num-workers", 0),
            *("--criterion", criterion, "--label-smoothing", 0.1, "--optimizer", "adam", "--lr", 3e-3),
            *("--max-tokens", 500, "--seed", 1, "--cpu", "--log-format", "json", "--log-interval", 1),
            *("--save-dir", save_dir, *more),
        ]

    return arguments


@pytest.fixture(scope="session")
def checkpoint(run, training, tmp_path_factory):
    """A node model trained for some epochs, with what it logged."""
    save_dir = tmp_path_factory.mktemp("node")
    solver = ("--node-solver", "bosh3", "--node-rtol", 0.1, "--node-atol", 0.1)
    log = run("fairseq-train", *training(save_dir, *solver, "--max-epoch", 3))
    (save_dir / "log").write_text(log)
    return save_dir / "checkpoint_last.pt"
