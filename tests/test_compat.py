"""Checkpoints load on every torch, as data only; test sets are complete."""

import argparse
import builtins
import os
import subprocess

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf

from fairseq_node import compat
from fairseq_node.compat import CorruptCheckpointError, UnsafeCheckpointError, load_checkpoint


@pytest.fixture(params=["torch", "restricted"], autouse=True)
def unpickler(request, monkeypatch):
    """torch's weights_only where it will do, and the unpickler that stands in for it before 2.6."""
    if request.param == "restricted":
        monkeypatch.setattr(compat, "_TORCH_HAS_WEIGHTS_ONLY", False)


@pytest.fixture(params=[True, False], ids=["zip", "legacy"])
def save(request, tmp_path):
    def write(state, name="checkpoint.pt"):
        torch.save(state, tmp_path / name, _use_new_zipfile_serialization=request.param)
        return str(tmp_path / name)

    return write


def test_all_that_fairseq_stores_is_loaded(save):
    state = {
        "args": argparse.Namespace(arch="node_transformer", lr=[1e-3], data=None),
        "cfg": OmegaConf.create({"model": {"layers": 2, "dims": [1, 2.5, "x", None, True]}}),
        "model": {
            "weight": torch.arange(3.0),
            "half": torch.ones(2).half(),
            "parameter": torch.nn.Parameter(torch.ones(1)),
        },
        "extra_state": {
            "val_loss": np.float64(3.5),
            "count": np.int64(4),
            "metrics": {"_bleu_counts": np.array([1, 2, 3]), "sum": np.arange(2.0)},
            "epochs": {1, 2},
        },
    }
    loaded = load_checkpoint(save(state))
    assert vars(loaded["args"]) == vars(state["args"])
    assert loaded["cfg"] == state["cfg"]
    assert torch.equal(loaded["model"]["weight"], state["model"]["weight"])
    assert loaded["extra_state"]["val_loss"] == 3.5 and loaded["extra_state"]["epochs"] == {1, 2}
    assert loaded["extra_state"]["metrics"]["_bleu_counts"].tolist() == [1, 2, 3]


class Call:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("place", ["args", "model", "optimizer"])
@pytest.mark.parametrize(
    "function,arguments",
    [
        (os.system, ("touch {}",)),
        (subprocess.Popen, (["touch", "{}"],)),
        (builtins.eval, ("open('{}', 'w')",)),
        (builtins.exec, ("open('{}', 'w')",)),
        (builtins.open, ("{}", "w")),
        (builtins.getattr, ("text", "upper")),
        (builtins.__import__, ("antigravity",)),
        (np.load, ("{}",)),
        (torch.load, ("{}",)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_smuggled_call_is_refused_and_not_run(save, tmp_path, function, arguments, place):
    marker = str(tmp_path / "ran")

    def fill(argument):
        return [fill(a) for a in argument] if isinstance(argument, list) else argument.format(marker)

    evil = Call(function, *map(fill, arguments))
    state = {
        "args": argparse.Namespace(x=evil if place == "args" else 1),
        "model": {"weight": evil if place == "model" else torch.ones(1)},
        "last_optimizer_state": [{"state": evil if place == "optimizer" else {}}],
    }
    path = save(state)
    for load in (load_checkpoint, checkpoint_utils.load_checkpoint_to_cpu):
        with pytest.raises(UnsafeCheckpointError, match="nothing in it was run") as caught:
            load(path)
        assert function.__name__ in str(caught.value) and path in str(caught.value)
    assert not os.path.exists(marker)


def test_a_class_of_ones_own_is_refused(save):
    with pytest.raises(UnsafeCheckpointError, match="Fraction"):
        load_checkpoint(save({"model": __import__("fractions").Fraction(1, 2)}))


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.98])
def test_a_truncated_checkpoint_is_not_called_malicious(save, tmp_path, part):
    path = save({"model": {"weight": torch.ones(100)}})
    whole = open(path, "rb").read()
    with open(path, "wb") as file:
        file.write(whole[: int(part * len(whole))])
    with pytest.raises(CorruptCheckpointError, match="--restore-file"):
        load_checkpoint(path)
    assert open(path, "rb").read() == whole[: int(part * len(whole))]


def test_a_missing_checkpoint_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_checkpoint(str(tmp_path / "none.pt"))


def test_torch_is_left_as_it_is():
    """For everybody else: the function, its default, and what it refuses."""
    assert torch.load.__module__ == "torch.serialization"
    assert checkpoint_utils.torch.load is not torch.load
    for module in (checkpoint_utils, distributed_utils):
        assert module.torch.nn is torch.nn and module.torch.load is load_checkpoint
    before = checkpoint_utils.torch, data_utils.batch_by_size
    compat.install()
    assert data_utils.batch_by_size is before[1]


def test_a_copy_is_whole_or_absent(tmp_path, monkeypatch):
    """fairseq copies a finished checkpoint to checkpoint_last.pt; a kill in between must not hurt."""
    manager = checkpoint_utils.PathManager
    source, target = str(tmp_path / "checkpoint1.pt"), str(tmp_path / "checkpoint_last.pt")
    open(source, "w").write("new")
    open(target, "w").write("old")
    assert not manager.copy(source, target)
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        manager.copy(source, target, overwrite=True)
    assert open(target).read() == "old"
    monkeypatch.undo()
    assert manager.copy(source, target, overwrite=True) and open(target).read() == "new"


@pytest.mark.parametrize("sentences", [5, 20, 24])
@pytest.mark.parametrize("max_tokens", [50, 1000])
def test_no_sentence_is_left_out_of_the_batches(sentences, max_tokens):
    """Later builds of fairseq drop a last batch whose size is no multiple of 8."""
    lengths = np.full(sentences, 5)
    batches = data_utils.batch_by_size(
        np.arange(sentences),
        num_tokens_fn=lambda index: 5,
        num_tokens_vec=lengths,
        max_tokens=max_tokens,
        required_batch_size_multiple=8,
    )
    assert np.concatenate(batches).tolist() == list(range(sentences))
