"""The table of runs: BLEU and significance are sacrebleu's, costs are the log's."""

import pytest
import sacrebleu
from lib import compare

LOG = """\
INFO | num. shared model params: 1,234 (num. trained: 1,234)
INFO | train_inner | epoch 001: loss=5.1, nll_loss=4.2, num_updates=60, train_wall=50
INFO | valid | epoch 001 | valid on 'valid' subset | loss 4 | nll_loss 3.5 |{nfe} num_updates 60
INFO | train_inner | epoch 002: loss=4.1, nll_loss=3.2, num_updates=100, train_wall=70
INFO | valid | epoch 002 | valid on 'valid' subset | loss 4 | nll_loss 3.6 |{nfe} num_updates 120
"""
REFERENCES = [f"the {n} men saw {n + 3} dogs in the park on day {n}" for n in range(100)]


@pytest.fixture
def folder(tmp_path):
    """Three runs: the references with a few errors, with the same errors, and with many."""
    for name, nfe, wrong in (
        ("stock", "", 10),
        ("euler", " nfe_encoder 3 | nfe_decoder 3 |", 10),
        ("bad", "", 2),
    ):
        run = tmp_path / name
        run.mkdir()
        (run / "train.log").write_text(LOG.format(nfe=nfe))
        lines = [
            line.replace("dogs", "cats") if n % wrong == 0 else line for n, line in enumerate(REFERENCES)
        ]
        (run / "test.hyp").write_text("".join(line + "\n" for line in lines))
        (run / "test.out").write_text("")
        (run / "test.log").write_text(
            "Translated 100 sentences (9 tokens) in 2s (50 sentences/s, 321.5 tokens/s)\n"
        )
    return tmp_path


def test_the_table(folder):
    runs = compare.read_runs(folder, "test")
    lines = compare.table(runs, REFERENCES, "stock", 200).splitlines()
    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines[2:5]
    }
    assert list(cells)[0] == "stock"  # the baseline comes first
    for run in runs:
        bleu = sacrebleu.corpus_bleu(run.hypotheses, [REFERENCES]).score
        assert cells[run.name][3] == f"{bleu:.2f}"
        assert cells[run.name][:3] == ["1,234", "120", "3.500"]  # the best validation, not the last
        assert cells[run.name][6:] == ["2 min", "322"]  # 50 s and 70 s
    assert cells["stock"][4] == "" and cells["stock"][5] == "-, -"
    assert float(cells["bad"][4]) < 0.01 and cells["euler"][4] == "same"
    assert cells["euler"][5] == "3.0, 3.0"
    assert "version" in lines[-1] and "bs:200" in lines[-1]


def test_one_run_needs_no_other(folder):
    runs = [run for run in compare.read_runs(folder, "test") if run.name == "euler"]
    assert "| euler | 1,234 |" in compare.table(runs, REFERENCES, "euler", 10)


def test_sentences_for_what_cannot_be(folder, tmp_path):
    runs = compare.read_runs(folder, "test")
    with pytest.raises(ValueError, match="--baseline none is none of the runs; use one of bad, euler, stock"):
        compare.table(runs, REFERENCES, "none", 10)
    with pytest.raises(ValueError, match="100 translations of 99 sentences"):
        compare.table(runs, REFERENCES[1:], "stock", 10)
    with pytest.raises(ValueError, match="has no run with test1.hyp"):
        compare.read_runs(folder, "test1")
