"""Killed again and again. Takes minutes: FAIRSEQ_NODE_KILLS=10 pytest tests/cli/test_kill.py -s"""

import os
import random
import signal
import time

import pytest
import torch

from fairseq_node.compat import load_checkpoint

KILLS = int(os.environ.get("FAIRSEQ_NODE_KILLS", 0))


@pytest.mark.skipif(KILLS == 0, reason="FAIRSEQ_NODE_KILLS says how often")
def test_a_run_killed_at_random_moments_is_the_undisturbed_run(run, training, tmp_path):
    """SIGKILL, every other time while a checkpoint is being written; dropout included, bit for bit."""
    options = ("--node-solver", "bosh3", "--node-gradient", "checkpoint", "--max-epoch", 40)
    options += ("--save-interval-updates", 1, "--keep-interval-updates", 2, "--disable-validation")
    options += ("--no-epoch-checkpoints",)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run("fairseq-train", *training(whole, *options))
    generator = random.Random(os.environ.get("FAIRSEQ_NODE_KILLS_SEED", "1"))
    for kill in range(KILLS):
        log = tmp_path / f"log{kill}"
        for left_behind in killed.glob("*.tmp"):
            left_behind.unlink()  # not to be taken for one that is being written now
        with log.open("w") as file:
            process = run.start("fairseq-train", *training(killed, *options), stdout=file, stderr=file)
        while '"update"' not in log.read_text():
            assert process.poll() is None, log.read_text()[-4000:]
            time.sleep(0.02)
        time.sleep(generator.uniform(0, 2))
        while kill % 2 and not any(killed.glob("*.tmp")):
            assert process.poll() is None, "finished before it was killed: raise --max-epoch"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        updates = log.read_text().count('"update"')
        half = [path.name for path in killed.glob("*.tmp")]
        print(f"kill {kill + 1}: after {updates} updates, half written: {half}", flush=True)
    assert "Loaded checkpoint" in run("fairseq-train", *training(killed, *options))
    expected, resumed = (load_checkpoint(str(folder / "checkpoint_last.pt")) for folder in (whole, killed))
    for name in expected["model"]:
        assert torch.equal(expected["model"][name], resumed["model"][name]), name
    moments, resumed_moments = (state["last_optimizer_state"]["state"] for state in (expected, resumed))
    for number in moments:
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(moments[number][name], resumed_moments[number][name]), name
