"""The demo's report, on a few lines of what fairseq writes."""

# ruff: noqa: E501 (fairseq's lines are long)

import subprocess
import sys
from pathlib import Path

import pytest
from lib import report

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"

STOCK_LOG = """\
2030-01-01 10:00:00 | INFO | fairseq_cli.train | num. shared model params: 224,256 (num. trained: 224,256)
2030-01-01 10:00:02 | INFO | train_inner | epoch 001:     20 / 40 loss=9.5, nll_loss=9.25, ppl=609.4, wps=0, ups=5, wpb=10, bsz=2, num_updates=20, lr=0.001, gnorm=1.5, clip=100, train_wall=2, wall=3
2030-01-01 10:00:04 | INFO | train_inner | epoch 001:     40 / 40 loss=4.5, nll_loss=4, ppl=16, wps=90.5, ups=10, wpb=10, bsz=2, num_updates=40, lr=0.002, gnorm=1.5, clip=100, train_wall=2, wall=5
2030-01-01 10:00:05 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 4.1 | nll_loss 3.5 | ppl 11.31 | wps 100 | wpb 10 | bsz 2 | num_updates 40
"""
NODE_LOG = """\
2030-01-01 10:00:00 | INFO | fairseq_cli.train | num. shared model params: 224,256 (num. trained: 224,256)
2030-01-01 10:00:02 | INFO | train_inner | epoch 001:     20 / 40 loss=9.5, nll_loss=9.25, nfe_encoder=8, nfe_decoder=9.5, ppl=609.4, wps=90.5, ups=2, wpb=10, bsz=2, num_updates=20, lr=0.001, train_wall=10, wall=3
2030-01-01 10:00:04 | INFO | train_inner | epoch 001:     40 / 40 loss=4.5, nll_loss=4, nfe_encoder=8, nfe_decoder=11, ppl=16, wps=90.5, ups=1, wpb=10, bsz=2, num_updates=40, lr=0.002, train_wall=20, wall=5
2030-01-01 10:00:09 | INFO | fairseq_cli.train | num. shared model params: 224,256 (num. trained: 224,256)
2030-01-01 10:00:14 | INFO | train_inner | epoch 001:     40 / 40 loss=4.5, nll_loss=4, nfe_encoder=8, nfe_decoder=12, ppl=16, wps=90.5, ups=4, wpb=10, bsz=2, num_updates=40, lr=0.002, train_wall=5, wall=5
2030-01-01 10:00:15 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 4.1 | nll_loss 3 | nfe_encoder 8 | nfe_decoder 12.25 | ppl 11.31 | wps 100 | wpb 10 | bsz 2 | num_updates 40
"""
OUTPUT = """\
INFO:fairseq_cli.generate:loading model(s) from somewhere
S-1\tone million
T-1\teine Million
H-1\t-0.25\teine Million
D-1\t-0.25\teine Million
P-1\t-0.25 -0.25
S-0\tfor twenty-one euros and one cent
T-0\tfür einundzwanzig Euro und einen Cent
H-0\t-0.5\tfür zwanzigundein Euro und einen Cent
D-0\t-0.5\tfür zwanzigundein Euro und einen Cent
P-0\t-0.25 -0.25
"""
MESSAGES = """\
INFO:fairseq_cli.generate:NOTE: hypothesis and token scores are output in base 2
INFO:fairseq_cli.generate:Translated 2 sentences (12 tokens) in 0.1s (20.00 sentences/s, 1234.50 tokens/s)
"""


@pytest.fixture
def demo(tmp_path):
    for name, log in (("stock", STOCK_LOG), ("node", NODE_LOG)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text(log, encoding="utf-8")
        (tmp_path / name / "test.out").write_text(OUTPUT, encoding="utf-8")
        (tmp_path / name / "test.log").write_text(MESSAGES, encoding="utf-8")
    return tmp_path


@pytest.fixture
def models(demo):
    return [report.read_model(name, demo / name) for name in ("stock", "node")]


def test_a_training_log_is_read(models):
    stock, node = (model.training for model in models)
    assert stock.parameters == node.parameters == 224256
    assert stock.updates == node.updates == 40
    assert stock.final["nll_loss"] == 3.5
    assert "nfe_encoder" not in stock.final
    assert (node.final["nfe_encoder"], node.final["nfe_decoder"]) == (8, 12.25)


def test_updates_of_a_resumed_training_count_once(models):
    training = models[1].training
    assert training.train[40]["nfe_decoder"] == 12
    assert training.seconds == 20 / 2 + 20 / 4


def test_translations_are_read_in_the_order_of_the_set(models):
    first, second = models[0].translations
    assert first.source == "for twenty-one euros and one cent"
    assert first.hypothesis == "für zwanzigundein Euro und einen Cent"
    assert second.reference == "eine Million"
    assert models[0].tokens_per_second == 1234.5


def test_messages_may_be_in_the_output(demo):
    (demo / "node" / "test.out").write_text(OUTPUT + MESSAGES, encoding="utf-8")
    (demo / "node" / "test.log").write_text("", encoding="utf-8")
    assert report.read_model("node", demo / "node").tokens_per_second == 1234.5


def test_unfinished_output_is_refused(demo):
    (demo / "node" / "test.log").write_text(MESSAGES.splitlines()[0], encoding="utf-8")
    with pytest.raises(ValueError, match="translate again"):
        report.read_model("node", demo / "node")
    (demo / "stock" / "train.log").write_text(STOCK_LOG.splitlines()[0], encoding="utf-8")
    with pytest.raises(ValueError, match="train again"):
        report.read_model("stock", demo / "stock")


def test_scores(models):
    translations = models[0].translations
    assert report.exact_match(translations) == 50
    assert 0 < report.bleu(translations).score < 100
    assert "|tok:13a|" in report.bleu(translations).signature


def test_table(models):
    lines = report.table(models).splitlines()
    cells = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in lines}
    assert len({len(line) for line in lines}) == 1
    assert cells[""] == ["stock", "node"]
    assert cells["exact match"] == ["50.0 %", "50.0 %"]
    assert cells["NFE decoder"] == ["-", "12.2"]
    assert cells["parameters"] == ["224,256", "224,256"]


def test_command_writes_the_report(demo):
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(SCRIPTS / "lib" / "report.py")]
    models = [f"{name}={demo / name}" for name in ("stock", "node")]
    done = subprocess.run(
        [*command, *models, "--out", str(demo / "report.md")], capture_output=True, text=True, check=True
    )
    text = (demo / "report.md").read_text(encoding="utf-8")
    assert "exact match" in done.stdout and "exact match" in text
    assert "tok:13a" in text and "](curves.png)" in text
    assert "**für zwanzigundein Euro und einen Cent**, not für einundzwanzig Euro und einen Cent" in text
    assert (demo / "curves.png").read_bytes().startswith(b"\x89PNG")

    (demo / "node" / "test.out").unlink()
    failed = subprocess.run(
        [*command, *models, "--out", str(demo / "other.md")], capture_output=True, text=True
    )
    assert failed.returncode == 1 and "test.out" in failed.stderr
    assert "Traceback" not in failed.stderr
