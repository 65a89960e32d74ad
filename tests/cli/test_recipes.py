"""The recipes as a user types them, on tiny corpora."""

import re

import pytest
import torch

from fairseq_node.compat import load_checkpoint


def hypotheses(output):
    return dict(re.findall(r"^(H-\d+)\t(.*)$", output, re.MULTILINE))


def test_a_converted_checkpoint(run, corpus, training, tmp_path):
    """It translates like the stock one, and goes on, optimizer included, with an adaptive solver."""
    stock, node = tmp_path / "stock" / "checkpoint_last.pt", tmp_path / "node.pt"
    run("fairseq-train", *training(tmp_path / "stock", "--max-epoch", 2, arch="transformer_tiny"))
    output = run("python", "scripts/convert_checkpoint.py", "--input", stock, "--output", node)
    assert "node_transformer" in output

    generate = ("fairseq-generate", corpus, "--user-dir", "fairseq_node", "--cpu", "--beam", 3)
    first, second = (hypotheses(run(*generate, "--max-len-b", 8, "--path", path)) for path in (stock, node))
    assert first.keys() == second.keys() and len(first) == 20
    for name, hypothesis in first.items():
        (score, text), (other_score, other_text) = (
            each.split("\t", 1) for each in (hypothesis, second[name])
        )
        assert text == other_text and float(score) == pytest.approx(float(other_score), abs=1e-4)

    adaptive = ("--restore-file", node, "--max-epoch", 3, "--node-solver", "heun_euler")
    output = run("fairseq-train", *training(tmp_path / "tuned", *adaptive))
    assert re.search(r"Loaded checkpoint .*node.pt \(epoch 3 @ \d+ updates\)", output)
    tuned, before = (load_checkpoint(path) for path in (tmp_path / "tuned" / "checkpoint_last.pt", node))
    updates = [state["optimizer_history"][-1]["num_updates"] for state in (before, tuned)]
    assert updates[1] == updates[0] * 3 // 2
    assert tuned["cfg"]["model"].node_solver == "heun_euler"
    name = "encoder.layers.0.fc1.weight"
    assert not torch.equal(tuned["model"][name], before["model"][name])
