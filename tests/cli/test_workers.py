"""Several workers, on CPU with gloo: the recipe of scripts/ end to end."""

import json
import os

import pytest
import torch

from fairseq_node.compat import load_checkpoint

STATISTICS = ("loss", "nll_loss", "path_loss", "gnorm", "nfe_encoder", "nfe_decoder", "nfe_backward")
STATISTICS += ("steps_rejected", "arclength_encoder", "arclength_decoder", "node_unfinished")
PERCENTILES = tuple(f"nfe_{side}_p{percent}" for side in ("encoder", "decoder") for percent in (50, 95))


def records(output):
    return [json.loads(line[line.index("{") :]) for line in output.splitlines() if '{"epoch"' in line]


@pytest.mark.parametrize("gradient", ["backprop", "checkpoint", "adjoint"])
def test_two_workers_are_one_with_the_same_batch(run, training, tmp_path, gradient):
    """Loss curve, parameters and statistics; sentences, and so workers, with different NFE. The number
    of batches is odd: one worker gets a dummy batch in the last update of an epoch."""
    options = [
        "--node-solver",
        "bosh3",
        "--node-rtol",
        0.02,
        "--node-atol",
        0.02,
        "--node-gradient",
        gradient,
    ]
    options += [
        "--dropout",
        0.0,
        "--max-tokens",
        100,
        "--update-freq",
        2,
        "--max-epoch",
        1,
        "--max-tokens-valid",
        40,
    ]
    options += ["--path-penalty", "arclength", "--path-weight", 0.1, "--path-warmup-updates", 3]
    options += ["--node-step-control", "batch"] if gradient == "adjoint" else []
    one, two = tmp_path / "one", tmp_path / "two"
    logs = [
        records(run("fairseq-train", *training(one, *options))),
        records(
            run(
                *("bash", "scripts/train_distributed.sh", "--workers", 2, "--"),
                *training(two, *options, "--tensorboard-logdir", two / "tb"),
            )
        ),
    ]
    assert len(logs[0]) == len(logs[1]) > 5
    differing = set()
    for single, double in zip(*logs):
        assert double.keys() == single.keys()
        for name in single:
            plain = name.replace("train_", "").replace("valid_", "")
            if plain in STATISTICS + PERCENTILES:
                assert float(double[name]) == pytest.approx(float(single[name]), rel=1e-3, abs=2e-3), name
                differing.add(float(single[name])) if plain == "nfe_decoder" else None
    assert len(differing) > 2
    assert {f"train_{name}" for name in STATISTICS} <= logs[1][-1].keys() | logs[1][-2].keys()
    valid = next(record for record in logs[1] if "valid_loss" in record)
    assert {f"valid_{name}" for name in PERCENTILES} <= valid.keys()
    assert not any("_p50" in name or "_p95" in name for name in logs[1][0])
    for side in ("encoder", "decoder"):
        assert valid[f"valid_nfe_{side}_p50"] <= valid[f"valid_nfe_{side}_p95"]
    expected, found = (load_checkpoint(str(path / "checkpoint_last.pt"))["model"] for path in (one, two))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=2e-5, msg=name)
    for subset in ("train", "valid"):
        events = b"".join(file.read_bytes() for file in (two / "tb" / subset).iterdir())
        assert b"nfe_encoder" in events and b"arclength_decoder" in events
        assert (b"nfe_decoder_p95" in events) == (subset == "valid")


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("--workers", "two", "--"), "--workers is 'two'"),
        (("--workers", 2, "--", "data", "--update-freq", 3), "--update-freq 4"),
        (("--worker", 2), "unknown option --worker"),
        ((), "the arguments of fairseq-train are missing"),
    ],
)
def test_the_recipe_refuses_in_a_sentence(run, arguments, message):
    output = run.fails("bash", "scripts/train_distributed.sh", *arguments)
    assert message in output and len(output.splitlines()) == 1
    assert "--workers N" in run("bash", "scripts/train_distributed.sh", "--help")


def test_torchrun_without_gpus_is_refused(run, training, tmp_path, monkeypatch):
    """fairseq would train two models that overwrite each other's checkpoints."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, value in dict(WORLD_SIZE=2, RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=1).items():
        monkeypatch.setitem(os.environ, name, str(value))
    recipe = ("bash", "scripts/train_distributed.sh", "--")
    for command in (("fairseq-train",), recipe):
        output = run.fails(*command, *training(tmp_path / "ck"))
        assert "torchrun started 2 workers" in output and "Traceback" not in output
    assert not (tmp_path / "ck").exists()
