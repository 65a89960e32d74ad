"""The recipes as a user types them, on tiny corpora."""

import gzip
import random
import re

import pytest
import torch

from fairseq_node.compat import load_checkpoint

WORDS = "alpha beta gamma delta epsilon zeta eta theta".split()


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
    # Without the optimizer's state (fairseq 0.12.2) fairseq counts updates anew.
    kept = updates[0] if before["last_optimizer_state"] else 0
    assert updates[1] == kept + updates[0] // 2
    assert tuned["cfg"]["model"].node_solver == "heun_euler"
    name = "encoder.layers.0.fc1.weight"
    assert not torch.equal(tuned["model"][name], before["model"][name])


@pytest.fixture
def raw(tmp_path):
    """Files with Multi30k's names, of reversed words."""
    generator = random.Random(1)
    folder = tmp_path / "raw"
    folder.mkdir()
    for split, size in (("train", 200), ("val", 10), ("test_2016_flickr", 12), ("test_2017_flickr", 9)):
        lines = [[generator.choice(WORDS) for _ in range(generator.randint(2, 6))] for _ in range(size)]
        for language, words in (("en", lines), ("de", [reversed(line) for line in lines])):
            text = "".join(" ".join(line) + "\n" for line in words)
            (folder / f"{split}.{language}.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def test_multi30k(run, raw, tmp_path, monkeypatch):
    """From raw files to BLEU of both test sets, and again, and with files that are not right."""
    data, prepare = tmp_path / "data", "scripts/prepare_multi30k.sh"
    monkeypatch.setenv("MULTI30K_PIECES", "60")
    monkeypatch.setenv("MULTI30K_URL", raw.as_uri())
    output = run.fails("bash", prepare, data)  # downloaded, it must be the published file
    assert "not the file that numbers are published on" in output
    monkeypatch.setenv("MULTI30K_URL", (tmp_path / "nowhere").as_uri())
    assert "could not be downloaded" in run.fails("bash", prepare, data)
    assert f"{tmp_path} has no " in run.fails("bash", prepare, data, tmp_path)
    whole = (raw / "val.de.gz").read_bytes()
    (raw / "val.de.gz").write_bytes(whole[:-9])
    assert "val.de.gz is broken or not complete" in run.fails("bash", prepare, data, raw)
    (raw / "val.de.gz").write_bytes(whole)

    output = run("bash", prepare, data, raw)
    assert "Warning" in output and "not the published file" in output
    assert run("bash", prepare, data, raw).count("is there already.") == 3
    monkeypatch.setenv("MULTI30K_PIECES", "61")
    assert "begun with other options" in run.fails("bash", prepare, data, raw)

    for name, value in (("DATA", data), ("DIR", tmp_path / "runs"), ("EPOCHS", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GENERATE", "--beam 2 --max-len-b 8")
    train = ("bash", "scripts/train_multi30k.sh", "tied-rk4", "--log-interval", 1)
    output = run(*train)
    assert "nfe_encoder=4" in output and output.count("BLEU|nrefs:1") == 2
    out = tmp_path / "runs" / "tied-rk4"
    assert [len((out / f"{name}.hyp").read_text().splitlines()) for name in ("test", "test1")] == [12, 9]
    assert load_checkpoint(out / "checkpoint_best.pt")["cfg"]["model"].encoder_layers == 1
    output = run(*train)  # nothing is left to do
    assert "is trained already" in output and "nfe_encoder" not in output
    assert "begun with other options" in run.fails(*train, "--dropout", 0)
    table = run(
        "python", "scripts/compare_runs.py", tmp_path / "runs", "--data", data, "--baseline", "tied-rk4"
    )
    assert re.search(r"\| tied-rk4 \|.*\| 4.0, 4.0 \|", table)


def test_wmt14_on_a_cpu(run, corpus, tmp_path, monkeypatch):
    """The recipe for GPUs with its tiny setting: batches, averaging, translation, BLEU of the text."""
    (tmp_path / "data" / "corpus" / "heldout").mkdir(parents=True)
    (tmp_path / "data" / "data-bin").symlink_to(corpus)
    (tmp_path / "data" / "corpus" / "heldout" / "test.de").symlink_to(corpus.parent / "test.de")
    for name, value in (("DATA", tmp_path / "data"), ("DIR", tmp_path / "run"), ("UPDATES", 20)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GENERATE", "--beam 2 --max-len-b 8")
    train = ("bash", "scripts/train_wmt14_en_de.sh")
    for variable, value, sentence in (
        ("GPUS", "999", "GPUS is 999, but this machine has"),
        ("MODEL", "lstm", "use node or stock"),
        ("DATA", "/none", "make it by python scripts/prepare_wmt14.py"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert sentence in run.fails(*train, "tiny")
    assert "use base, big or tiny" in run.fails(*train, "huge")
    output = run(*train, "tiny", "--node-solver", "rk4", "--lr", 1e-2)
    assert "1 x 1000 tokens x 2 = 2000 tokens a batch" in output
    assert "nfe_encoder=4" in output and "the mean of" in output
    assert re.search(r"BLEU\|nrefs:1\|case:mixed.* = ", output)
    assert len((tmp_path / "run" / "test.hyp").read_text().splitlines()) == 20
