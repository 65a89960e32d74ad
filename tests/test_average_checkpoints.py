"""Averaging: the mean of the weights, and sentences where that cannot be."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import average_checkpoints
import pytest
import torch

from fairseq_node.compat import UnsafeCheckpointError, load_checkpoint

SCRIPT = Path(average_checkpoints.__file__)


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of epochs 1, 2, 9, 10 and of updates 100, 900: the weights are their numbers."""
    for name, number in [
        *((f"checkpoint{epoch}.pt", epoch) for epoch in (1, 2, 9, 10)),
        *((f"checkpoint_3_{update}.pt", update) for update in (100, 900)),
        *(("checkpoint_best.pt", -1), ("checkpoint_last.pt", -1)),
    ]:
        state = {
            "args": argparse.Namespace(arch="transformer"),
            "model": {"weight": torch.full((2, 3), float(number)), "half": torch.ones(2).half() * number},
            "extra_state": {"epoch": number},
        }
        state["model"]["count"] = torch.tensor([number])
        torch.save(state, tmp_path / name)
    return tmp_path


def run(*arguments):
    """The script as a user types it: exit status, and what it said."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], text=True, capture_output=True, timeout=300
    )
    return done.returncode, done.stderr + done.stdout


@pytest.mark.parametrize(
    "count,by_update,bound,expected",
    [
        (2, False, None, ["checkpoint10.pt", "checkpoint9.pt"]),  # by number, not by letter
        (2, False, 9, ["checkpoint9.pt", "checkpoint2.pt"]),
        (2, True, None, ["checkpoint_3_900.pt", "checkpoint_3_100.pt"]),
        (1, True, 500, ["checkpoint_3_100.pt"]),
    ],
)
def test_the_last_checkpoints_of_a_folder(folder, count, by_update, bound, expected):
    paths = average_checkpoints.last_checkpoints(str(folder), count, by_update, bound)
    assert [os.path.basename(path) for path in paths] == expected


def test_too_few_checkpoints(folder):
    with pytest.raises(ValueError, match=r"--num-epoch-checkpoints is 5, but .* has only 4"):
        average_checkpoints.last_checkpoints(str(folder), 5, False)


def test_the_mean_of_all_and_the_rest_of_the_first(folder):
    paths = [str(folder / f"checkpoint{epoch}.pt") for epoch in (10, 2, 1)]
    state = average_checkpoints.average(paths)
    torch.testing.assert_close(state["model"]["weight"], torch.full((2, 3), 13 / 3))
    assert state["model"]["half"].dtype == torch.half
    assert state["model"]["count"].tolist() == [4]
    # as fairseq's script: a run that goes on from the mean goes on from the newest
    assert state["extra_state"] == {"epoch": 10} and state["args"].arch == "transformer"


def test_half_precision_keeps_its_digits(tmp_path):
    """The sum of these overflows in half precision."""
    for number in range(3):
        torch.save({"model": {"weight": torch.tensor([60000.0]).half()}}, tmp_path / f"{number}.pt")
    state = average_checkpoints.average([str(tmp_path / f"{number}.pt") for number in range(3)])
    assert state["model"]["weight"].item() == torch.tensor(60000.0).half().item()


@pytest.mark.parametrize("other", [{"weight": torch.ones(3)}, {"bias": torch.ones(2, 3)}])
def test_different_models(tmp_path, other):
    torch.save({"model": {"weight": torch.ones(2, 3)}}, tmp_path / "a.pt")
    torch.save({"model": other}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"b\.pt has other parameters than .*a\.pt"):
        average_checkpoints.average([str(tmp_path / "a.pt"), str(tmp_path / "b.pt")])


def test_no_checkpoint_of_fairseq(tmp_path):
    torch.save({"weight": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="holds no model"):
        average_checkpoints.average([str(tmp_path / "a.pt")])


def test_a_malicious_checkpoint_is_refused(folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"model": {"weight": Evil()}}, folder / "evil.pt")
    with pytest.raises(UnsafeCheckpointError, match="system"):
        average_checkpoints.average([str(folder / "checkpoint1.pt"), str(folder / "evil.pt")])
    assert not (tmp_path / "ran").exists()


def test_command(folder):
    output = folder / "average.pt"
    command = ("--inputs", folder, "--num-epoch-checkpoints", 2, "--output", output)
    status, said = run(*command)
    assert status == 0 and "checkpoint10.pt" in said
    assert load_checkpoint(output)["model"]["weight"][0, 0] == 9.5
    before = output.read_bytes()
    status, said = run(*command)
    assert status != 0 and "use another name, or --overwrite" in said and output.read_bytes() == before


@pytest.mark.parametrize(
    "options,message",
    [
        (("--num-epoch-checkpoints", 0), "cannot average the last 0"),
        (("--checkpoint-upper-bound", 3), "add one of these"),
        (("{folder}", "--num-update-checkpoints", 1), "--inputs names 2 paths"),
        (("--num-epoch-checkpoints", 1, "--output", "{folder}/none/x.pt"), "make it first"),
        (("{folder}/none.pt",), "none.pt"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(folder, options, message, capsys, monkeypatch):
    options = [str(option).format(folder=folder) for option in options]
    arguments = ["average_checkpoints.py", "--output", str(folder / "x.pt"), "--inputs", str(folder)]
    if "none.pt" in options[0]:
        arguments.pop()
    monkeypatch.setattr(sys, "argv", arguments + options)
    with pytest.raises(SystemExit) as stopped:
        average_checkpoints.main()
    said = capsys.readouterr().err + str(stopped.value)
    assert message in said and stopped.value.code != 0
    assert not (folder / "x.pt").exists()
