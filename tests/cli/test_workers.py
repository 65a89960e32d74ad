"""Several workers train what one would with the same total batch, live and die together."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from fairseq_node.compat import load_checkpoint

RECIPE = ("bash", "scripts/train_distributed.sh")
GRADIENTS = ("backprop", "checkpoint", "adjoint")
STATISTICS = (
    *("num_updates", "wpb", "gnorm", "loss", "nll_loss", "path_loss"),
    *("nfe_encoder", "nfe_decoder", "nfe_backward", "steps_rejected", "node_unfinished"),
    *("arclength_encoder", "arclength_decoder", "nfe_decoder_p50", "nfe_decoder_p95"),
)

#: Several commands of fairseq in one process, which imports it once.
TRAIN_ALL = """
import json, sys
from fairseq_cli.train import cli_main
for arguments in json.load(sys.stdin):
    sys.argv = ["fairseq-train", *arguments]
    cli_main()
"""


def statistics(output):
    """What fairseq's json log says, line by line."""
    found = [json.loads(line[line.index("{") :]) for line in output.splitlines() if '{"epoch"' in line]
    known = {prefix + key for prefix in ("", "train_", "valid_") for key in STATISTICS} - {"valid_wpb"}
    return [{key: float(record[key]) for key in record if key in known} for record in found]


@pytest.fixture
def options(training, tmp_path):
    """Arguments of fairseq-train; without dropout, of which workers draw other masks than one worker."""

    def arguments(name, gradient="backprop", *more):
        common = ("--node-solver", "bosh3", "--node-rtol", 0.05, "--node-atol", 0.05, "--dropout", 0)
        common += ("--node-gradient", gradient, "--path-penalty", "arclength", "--path-weight", 0.1)
        common += ("--max-tokens", 200, "--max-epoch", 1)
        if gradient == "adjoint":
            common += ("--node-step-control", "batch")
        return list(map(str, training(tmp_path / name, *common, *more)))

    return arguments


def test_two_workers_are_one_with_twice_the_batch(run, options, tmp_path):
    """The curve, the statistics and the parameters, for every gradient. Batches, and so workers, differ
    in NFE; an epoch has an odd number of them, so that one worker has none at its last update."""
    one = [options(f"one_{gradient}", gradient, "--update-freq", 2) for gradient in GRADIENTS]
    expected = statistics(run("python", "-c", TRAIN_ALL, stdin=json.dumps(one)))
    found = [
        record
        for gradient in GRADIENTS
        for record in statistics(run(*RECIPE, "--workers", 2, "--", *options(gradient, gradient)))
    ]
    assert len(found) == len(expected) > 15
    assert len({record.get("nfe_decoder") for record in expected}) > 2
    for number, (one, two) in enumerate(zip(expected, found)):
        assert one.keys() == two.keys()
        for key in one:
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=2e-3), (number, key)
    for gradient in GRADIENTS:
        state, reference = (
            load_checkpoint(str(tmp_path / name / "checkpoint_last.pt"))["model"]
            for name in (gradient, f"one_{gradient}")
        )
        for name in reference:
            print(gradient, name, (state[name] - reference[name]).abs().max().item())
            torch.testing.assert_close(state[name], reference[name], rtol=1e-4, atol=2e-5, msg=name)


def workers_of(process):
    """Process numbers of a recipe's workers: those of its children that are fairseq-train by now."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [child for child in children if "--distributed-rank" in command_of(child)]


def command_of(number):
    try:
        return Path(f"/proc/{number}/cmdline").read_text()
    except OSError:
        return ""


def wait_until(condition):
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("not within a minute")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the workers")
@pytest.mark.parametrize("victim", [signal.SIGTERM, signal.SIGKILL, "worker"])
def test_workers_end_together(run, options, victim, tmp_path):
    """Whether the recipe is stopped, killed, or loses a worker; the workers are still importing here."""
    log = (tmp_path / "log").open("w")
    process = run.start(*RECIPE, "--workers", 2, "--", *options("x"), stdout=log, stderr=log)
    wait_until(lambda: len(workers_of(process)) == 2 or process.poll() is not None)
    workers = workers_of(process)
    assert len(workers) == 2
    if victim == "worker":
        os.kill(int(workers[1]), signal.SIGKILL)
    else:
        process.send_signal(victim)
    status = process.wait(timeout=60)
    wait_until(lambda: not any("--distributed-rank" in command_of(worker) for worker in workers))
    if victim == "worker":
        assert status == 128 + signal.SIGKILL
        assert "a worker ended with status 137; ending the others" in (tmp_path / "log").read_text()
    else:
        assert status in (-victim, 128 + victim)


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("--workers", "two", "--", "data"), "--workers is 'two'; use a number"),
        (("--workers", 2), "put fairseq-train's arguments after --"),
        (("--worker", 2, "--", "data"), "--worker is not an option"),
        (
            ("--workers", 3, "--reference-workers", 8, "--", "data", "--cpu"),
            "--reference-workers is 8, with 3 workers; use a multiple of 3",
        ),
        (
            ("--reference-workers", 2, "--", "data", "--cpu", "--update-freq=4"),
            "--reference-workers sets --update-freq",
        ),
    ],
)
def test_the_recipe_refuses_in_a_sentence(run, arguments, message):
    output = run.fails(*RECIPE, *arguments)
    assert message in output and len(output.splitlines()) == 1


def test_torchrun_without_gpus_is_refused(run, options, monkeypatch, tmp_path):
    """fairseq would train two models that overwrite each other's checkpoints."""
    for name, value in dict(WORLD_SIZE=2, RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=1).items():
        monkeypatch.setenv(name, str(value))
    output = run.fails(*RECIPE, "--", *options("x"))
    assert "torchrun needs CUDA" in output and "--workers 2" in output and len(output.splitlines()) == 1
    output = run.fails("fairseq-train", *options("x"))
    assert "torchrun started 2 workers" in output and "Traceback" not in output
    assert not (tmp_path / "x").exists()


def test_launchers_give_the_number_of_workers(run, tmp_path, monkeypatch):
    """What fairseq-train is called with under torchrun, under Slurm and on one node of two GPUs."""
    calls = tmp_path / "bin"
    calls.mkdir()
    for name, body in (("fairseq-train", 'echo "$@"'), ("python", "echo 2")):  # 2: the number of GPUs
        (calls / name).write_text(f"#!/bin/sh\n{body}\n")
        (calls / name).chmod(0o755)
    here = ("env", f"PATH={calls}:{os.environ['PATH']}")
    torchrun = ("MASTER_ADDR=a", "MASTER_PORT=1", "WORLD_SIZE=4", "RANK=0")
    slurm = ("SLURM_PROCID=0", "SLURM_STEP_NODELIST=a,b", "SLURM_NNODES=2", "SLURM_JOB_ID=50007")
    for launcher, expected in (
        ((), "data --update-freq 4 --distributed-world-size 2"),
        (torchrun, "data --update-freq 2 --distributed-world-size 4"),
        (
            (*slurm, "SLURM_NTASKS=2"),  # a task per node: fairseq starts a worker per GPU from each
            "data --distributed-port 10007 --update-freq 2 --distributed-world-size 4",
        ),
        (
            (*slurm, "SLURM_NTASKS=8", "SLURM_NTASKS_PER_NODE=4"),
            "data --distributed-port 10007 --update-freq 1 --distributed-world-size 8",
        ),
    ):
        output = run(*here, *launcher, *RECIPE, "--reference-workers", 8, "--", "data")
        assert output.strip() == expected, launcher
