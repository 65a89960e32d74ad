"""The depth report: numbers that agree with the model's and closed forms; a file that stands alone."""

import argparse
import json
import re

import depth_report
import pytest
import torch
from fairseq.data import Dictionary, LanguagePairDataset
from lib import depth, depth_html

from fairseq_node.modules import runge_kutta


class Sentences(torch.utils.data.Dataset):
    """Token tensors with what LanguagePairDataset asks for."""

    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, number):
        return self.rows[number]

    def __len__(self):
        return len(self.rows)


@pytest.fixture
def loaded(build, dictionary):
    """A model of two blocks on each side with a task that has a test set of 12 sentences."""
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 9, 5, 4, 7, 3, 12, 6, 5, 8, 2, 10]

    def sentences(extra):
        words = [torch.randint(4, len(dictionary), (n + extra,), generator=generator) for n in lengths]
        return Sentences([torch.cat([each, torch.tensor([dictionary.eos()])]) for each in words])

    source, target = sentences(0), sentences(1)
    sizes = [[len(each) for each in rows.rows] for rows in (source, target)]
    dataset = LanguagePairDataset(source, sizes[0], dictionary, target, sizes[1], dictionary)

    class Task:
        source_dictionary = target_dictionary = dictionary

        def load_dataset(self, subset):
            if subset != "test":
                raise FileNotFoundError(f"no {subset}")

        def dataset(self, subset):
            return dataset

    model = build("node_transformer", node_solver="bosh3", node_rtol=1e-3, node_atol=1e-3).eval()
    return depth.Loaded(model, Task(), torch.device("cpu"), converted=False)


def test_batches_are_all_or_a_spread_sample(loaded):
    numbers = [number for batch in depth.batches(loaded, "test", 30, None) for number in batch["id"].tolist()]
    assert sorted(numbers) == list(range(12))
    some = [number for batch in depth.batches(loaded, "test", 30, 4) for number in batch["id"].tolist()]
    assert sorted(some) == [0, 3, 6, 9]
    with pytest.raises(depth.ReportError, match="there is no set valid"):
        depth.batches(loaded, "valid", 30, None)


def test_what_is_measured_is_what_a_sentence_alone_takes(loaded):
    """Batched or not; loss in bits against torch's own cross-entropy."""
    together = {
        each.id: each
        for batch in depth.batches(loaded, "test", 1000, None)
        for each in depth.measure(loaded, batch)
    }
    dataset = loaded.task.dataset("test")
    for number in (1, 6):
        batch = dataset.collater([dataset[number]])
        with torch.no_grad():
            logits, extra = loaded.model(**batch["net_input"])
        each = together[number]
        assert (
            each.source_length == len(dataset[number]["source"]) == batch["net_input"]["src_tokens"].size(1)
        )
        assert each.target_length == len(dataset[number]["target"])
        loss = torch.nn.functional.cross_entropy(logits[0], batch["target"][0]) / torch.log(torch.tensor(2.0))
        assert each.loss == pytest.approx(float(loss), rel=1e-4)
        for side in depth.SIDES:
            records = extra["node"][side]
            assert getattr(each, f"nfe_{side}") == sum(int(record.nfe) for record in records)
            arclength = sum(float(record.arclength) for record in records)
            assert getattr(each, f"arclength_{side}") == pytest.approx(arclength, rel=1e-4)


def test_steps_cover_the_depth_of_every_sentence(loaded):
    (batch,) = depth.batches(loaded, "test", 10_000, None)
    with torch.no_grad():
        records = loaded.model(**batch["net_input"])[1]["node"]
    steps = depth.steps(loaded, batch)
    for side in depth.SIDES:
        for block in (1, 2):
            of_block = [each for each in steps if (each.side, each.block) == (side, block)]
            assert len(of_block) == int(records[side][block - 1].accepted.sum())
            assert sum(each.dt for each in of_block) == pytest.approx(12.0, rel=1e-4)
            assert all(0 <= each.t < 1 and 0 < each.dt <= 1 for each in of_block)
    solve = depth.solver.solve
    assert solve.__module__ == "fairseq_node.modules.solver"  # recording is over


def test_trajectories_begin_and_end_where_the_model_does(loaded, monkeypatch):
    """Without a projection: from the embedding, through every block, to its output."""
    seen = {}
    monkeypatch.setattr(depth, "project", lambda states: (seen.setdefault(len(seen), states)[..., :2], 1.0))
    result = depth.trajectories(loaded, "test", 3, times=5)
    batch = loaded.task.dataset("test").collater([loaded.task.dataset("test")[3]])
    model = loaded.model
    with torch.no_grad():
        out = model.encoder(batch["net_input"]["src_tokens"], batch["net_input"]["src_lengths"], True)
    tokens = batch["net_input"]["src_tokens"].size(1)
    assert seen[0].shape == (tokens, 10, 32)
    states = torch.stack(out["encoder_states"]).squeeze(2).transpose(0, 1)  # pieces, blocks + 1, channels
    for time, block in ((0, 0), (4, 1), (5, 1), (9, 2)):
        torch.testing.assert_close(seen[0][:, time], states[:, block], rtol=1e-4, atol=1e-4)
    assert result["encoder"].ends == [0, 4, 9] and len(result["decoder"].pieces) == 6
    with pytest.raises(depth.ReportError, match="--sentence is 12, but the last of the set is 11"):
        depth.trajectories(loaded, "test", 12)


def test_the_plane_of_the_largest_variance():
    """Points in a plane of many dimensions keep their distances; a third direction is told."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(7, 2, generator=generator, dtype=torch.float64)).Q
    plane, share = depth.project((flat @ basis.t() + 3).reshape(4, 5, 7))
    assert share == pytest.approx(1.0) and plane.shape == (4, 5, 2)
    torch.testing.assert_close(
        torch.cdist(plane.reshape(20, 2), plane.reshape(20, 2)), torch.cdist(flat, flat)
    )
    corners = torch.cat([torch.eye(3), -torch.eye(3)])
    assert depth.project(corners)[1] == pytest.approx(2 / 3)


def test_dense_output_knows_its_steps():
    """A field with a closed form: the recorded solution is it, in between too."""
    y = torch.ones(2, 3, dtype=torch.float64)
    rate = torch.tensor([[1.0], [4.0]], dtype=torch.float64)

    class Decay:
        def __init__(self, rate):
            self.rate = rate

        def __call__(self, t, y):
            return -self.rate * y

        def select(self, rows):
            return Decay(self.rate[rows])

    dense = runge_kutta.adaptive(
        Decay(rate), y, 1.0, runge_kutta.TABLEAUS["dopri5"], rtol=1e-8, atol=1e-8, dense=True
    ).dense
    solve = depth.Solve("encoder", 1, 1.0, dense)
    assert sum(step.dt for step in solve.steps()) == pytest.approx(2.0)
    for t in (0.0, 0.3, 1.0):
        torch.testing.assert_close(dense(t), torch.exp(-rate * t).expand(2, 3), rtol=1e-6, atol=1e-6)


def test_correlation_and_what_is_said_about_it():
    assert depth_html.correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert depth_html.correlation([1, 2, 3], [1, 0, 1]) == pytest.approx(0)
    assert depth_html.correlation([1, 2, 3], [5, 5, 5]) is None and depth_html.correlation([1], [1]) is None

    def sentence(number, nfe):
        return depth.Sentence(number, 3, 3, 1.0, nfe, 8, 1.0, 1.0, 0, 0)

    same = [sentence(number, 8) for number in range(40)]
    assert "does not adapt" in depth_html._adapts(same)
    assert "same 16" in depth_html._adapts([*same, sentence(40, 11)])
    assert "Depth adapts" in depth_html._adapts([sentence(number, 8 + number) for number in range(40)])


@pytest.fixture
def files(build, tmp_path, monkeypatch):
    """A stock checkpoint and binary data on disk, and the script run in this process."""
    preprocess = pytest.importorskip("fairseq_cli.preprocess")
    from fairseq import options

    words = [f"w{number}" for number in range(20)]
    for split, size in (("train", 40), ("valid", 4), ("test", 6)):
        for language, step in (("en", 1), ("de", 3)):
            lines = [" ".join(words[(n * step + k) % 20] for k in range(2 + n % 5)) for n in range(size)]
            (tmp_path / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    pairs = [
        text for split in ("train", "valid", "test") for text in (f"--{split}pref", str(tmp_path / split))
    ]
    command = ["-s", "en", "-t", "de", "--joined-dictionary", "--destdir", str(tmp_path / "bin"), *pairs]
    preprocess.main(options.get_preprocessing_parser().parse_args(command))
    dictionary = Dictionary.load(str(tmp_path / "bin" / "dict.en.txt"))

    class Task:
        source_dictionary = target_dictionary = dictionary

    from fairseq.models import build_model

    args = argparse.Namespace(arch="transformer_tiny", task="translation", data="elsewhere", source_lang="en")
    vars(args).update(target_lang="de", share_all_embeddings=True, encoder_normalize_before=True)
    args.decoder_normalize_before = True
    torch.manual_seed(0)
    model = build_model(args, Task)
    history = {"criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqAdam", "num_updates": 3}
    state = {"args": args, "model": model.state_dict(), "extra_state": {"train_iterator": {"epoch": 1}}}
    state["optimizer_history"] = [{**history, "lr_scheduler_state": {}}]
    torch.save(state, tmp_path / "stock.pt")

    def run(*arguments):
        command = ["depth_report.py", "--path", tmp_path / "stock.pt", "--data", tmp_path / "bin", "--cpu"]
        monkeypatch.setattr("sys.argv", [*map(str, [*command, *arguments])])
        try:
            depth_report.main()
        except SystemExit as stopped:
            return str(stopped.code)

    return run


def test_the_report_of_a_stock_checkpoint(files, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "report.html"
    options = ("--out", out, "--tolerances", 0.5, 0.01, "--beam", 2, "--sentence", 2, "--max-len-b", 6)
    assert files(*options) is None
    text = out.read_text()
    assert text.count("<svg") == text.count("</svg>") == 7
    # Nothing is loaded from elsewhere: the file stands alone.
    assert not re.search(r'(src|href)="(?!#)', text.replace("http://www.w3.org", ""))
    for words in ("6 sentences; solver bosh3", "stock Transformer", "paths of sentence 2", "euler, 1 step"):
        assert words in text, words
    results = json.loads((tmp_path / "report.html.json").read_text())["results"]
    assert len(results["sentences"]) == 6
    assert (
        results["bosh3, 0.01"]["nfe"] > results["bosh3, 0.5"]["nfe"] > results["euler, 1 step"]["nfe"] == 4.0
    )
    assert not list(tmp_path.glob("*.part"))

    assert files(*options) == "2" and "--overwrite" in capsys.readouterr().err
    # What has been measured is not measured again.
    monkeypatch.setattr(depth, "point", None)
    monkeypatch.setattr(depth, "measure", None)
    assert files(*options, "--overwrite") is None
    assert "there is no set train5" in files("--out", tmp_path / "b.html", "--gen-subset", "train5")
    assert files("--out", tmp_path / "b.html", "--tolerance", -1) == "2"
    assert "--sentence is 6" in files("--out", tmp_path / "b.html", "--sentence", 6)
