"""fairseq-generate and fairseq-interactive on a trained model, in this process: many options, one import."""

import json
import re

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import generate as fairseq_generate
from fairseq_cli import interactive as fairseq_interactive

from fairseq_node.tasks.node_translation import depth_of

GRID = "{'node_solver': 'rk4'}"
EXACT = "{'node_decode': 'exact'}"


def hypotheses(output):
    """``{id: [(score, text), ...]}``"""
    found = {}
    for number, score, text in re.findall(r"^H-(\d+)\t([-\d.einf]+)\t(.*)$", output, re.MULTILINE):
        found.setdefault(int(number), []).append((float(score), text))
    return found


def same(one, other, tolerance=1e-4):
    """Whether two outputs have the same hypotheses and scores."""
    one, other = hypotheses(one), hypotheses(other)
    assert one.keys() == other.keys() and len(one) > 0
    for number in one:
        assert [text for _, text in one[number]] == [text for _, text in other[number]]
        for (score, _), (expected, _) in zip(one[number], other[number]):
            assert score == pytest.approx(expected, abs=tolerance)


@pytest.fixture
def generate(corpus, checkpoint, tmp_path):
    """Runs fairseq-generate; returns what it wrote."""

    def run(*arguments, path=checkpoint, out=tmp_path, task="translation"):
        command = [corpus, "--user-dir", "fairseq_node", "--path", path, "--cpu", "--max-len-b", 10]
        command += ["--results-path", out, "--task", task, "--max-tokens", 400, *arguments]
        parser = options.get_generation_parser(default_task=task)
        fairseq_generate.main(options.parse_args_and_arch(parser, list(map(str, command))))
        return (out / "generate-test.txt").read_text()

    return run


@pytest.fixture
def interact(corpus, checkpoint, tmp_path, capsys):
    """Runs fairseq-interactive on lines; returns what it printed."""

    def run(lines, *arguments):
        (tmp_path / "lines").write_text("".join(line + "\n" for line in lines))
        command = [corpus, "--user-dir", "fairseq_node", "--path", checkpoint, "--cpu", "--max-len-b", 10]
        command += ["--source-lang", "en", "--target-lang", "de", "--input", tmp_path / "lines", *arguments]
        parser = options.get_interactive_generation_parser()
        args = options.parse_args_and_arch(parser, list(map(str, command)))
        capsys.readouterr()
        fairseq_interactive.main(convert_namespace_to_omegaconf(args))
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("beam", [1, 10])
def test_batches_do_not_change_a_translation(generate, beam):
    search = ("--beam", beam, "--nbest", min(beam, 3))
    same(generate(*search, "--batch-size", 64), generate(*search, "--batch-size", 3))


def test_neither_batches_nor_their_order_nor_padding_change_a_translation(generate, interact):
    search = ("--beam", 4, "--nbest", 3)
    expected = generate(*search, "--batch-size", 1)
    same(generate(*search, "--batch-size", 64), expected)
    same(generate(*search, "--batch-size", 64, "--left-pad-source"), expected)  # a switch: pads on the right
    sources = dict(re.findall(r"^S-(\d+)\t(.*)$", expected, re.MULTILINE))
    lines = [sources[str(number)] for number in range(len(sources))]
    same(interact(lines, *search, "--buffer-size", 64, "--batch-size", 7), expected)
    backwards = hypotheses(interact(lines[::-1], *search, "--buffer-size", 5))
    forwards = hypotheses(expected)
    for number in forwards:
        ours = [text for _, text in backwards[len(lines) - 1 - number]]
        assert ours == [text for _, text in forwards[number]]


def test_cached_and_exact_decoding_agree(generate):
    """The corpus and the tolerance are coarse: hypotheses may differ where two are nearly as good."""
    cached, exact = (hypotheses(generate("--model-overrides", o)) for o in ("{}", EXACT))
    agree = [cached[number][0][1] == exact[number][0][1] for number in cached]
    assert sum(agree) >= 0.8 * len(agree)
    for number, equal in zip(cached, agree):
        if equal:
            assert cached[number][0][0] == pytest.approx(exact[number][0][0], abs=0.1)


def test_ensembles_of_node_and_stock_models(run, training, generate, checkpoint, tmp_path):
    run("fairseq-train", *training(tmp_path / "stock", "--max-epoch", 2, arch="transformer_tiny"))
    stock = tmp_path / "stock" / "checkpoint_last.pt"
    alone = generate("--beam", 3)
    same(generate("--beam", 3, path=f"{checkpoint}:{checkpoint}"), alone)
    mixed = generate("--beam", 3, path=f"{checkpoint}:{stock}", task="node_translation")
    assert hypotheses(mixed).keys() == hypotheses(alone).keys() and mixed != alone
    # The stock model has no depth to tell of.
    assert len((tmp_path / "generate-test.jsonl").read_text().splitlines()) == 20


def test_constraints_appear(interact):
    lines = ["alpha beta gamma\tTHETA", "delta\tALPHA\tZETA"]
    found = hypotheses(interact(lines, "--constraints", "--beam", 5))
    assert "THETA" in found[0][0][1]
    assert "ALPHA" in found[1][0][1] and "ZETA" in found[1][0][1]


def test_scores_of_references_are_those_of_teacher_forcing(generate):
    output = generate("--score-reference", "--beam", 1)
    assert len(hypotheses(output)) == 20
    generated = hypotheses(generate("--beam", 1, "--prefix-size", 20))  # the whole reference is forced
    for number, [(score, text)] in hypotheses(output).items():
        assert generated[number][0][1] == text
        assert generated[number][0][0] == pytest.approx(score, abs=0.1)


def test_shortest_and_longest_sources(interact):
    """An empty line, one word, and as many as the model has positions for (the end of sentence is one)."""
    lines = ["", "alpha", " ".join(["beta"] * 1023)]
    assert hypotheses(interact(lines, "--beam", 2)).keys() == {0, 1, 2}


def test_node_translation_tells_the_depth_of_every_hypothesis(generate, checkpoint, tmp_path, caplog):
    caplog.set_level("INFO")
    plain = generate("--beam", 3, "--nbest", 2)
    same(generate("--beam", 3, "--nbest", 2, task="node_translation"), plain, tolerance=0)
    lines = [json.loads(line) for line in (tmp_path / "generate-test.jsonl").read_text().splitlines()]
    order = re.findall(r"^S-(\d+)", plain, re.MULTILINE)
    assert [line["id"] for line in lines] == list(map(int, order))
    for line in lines:
        best = hypotheses(plain)[line["id"]]
        assert [each["score"] for each in line["hypotheses"]] == pytest.approx([score for score, _ in best])
        assert line["target_length"] == len(best[0][1].split()) + 1
        assert line["nfe_decoder"] == line["hypotheses"][0]["nfe_decoder"] >= 5
        assert line["nfe_encoder"] >= 5 and line["arclength_encoder"] > 0 and line["arclength_decoder"] > 0
        assert line["node_unfinished"] == 0
    summary = [record.message for record in caplog.records if record.message.startswith("Depth of")]
    assert len(summary) == 1 and "20 sentences" in summary[0]
    mean = sum(line["nfe_encoder"] for line in lines) / len(lines)
    assert f"nfe_encoder {mean:.1f}" in summary[0]
    assert "NFE per block and position" in summary[0]


def test_depth_is_that_of_teacher_forcing(build, sample, dictionary):
    model = build("node_transformer", node_solver="bosh3", node_rtol=0.01, node_atol=0.01).eval()
    batch = sample()
    tokens = [row[row.ne(dictionary.pad())] for row in batch["target"]]
    found = depth_of([model], batch, [[{"tokens": row, "score": -1.0}] for row in tokens], dictionary)
    _, extra = model(**batch["net_input"])
    for side in ("encoder", "decoder"):
        for name in ("nfe", "arclength"):
            expected = sum(getattr(record, name) for record in extra["node"][side])
            assert [each[f"{name}_{side}"] for each in found] == pytest.approx(expected.tolist())
    assert [each["source_length"] for each in found] == [7, 5, 3, 6]


def test_a_checkpoint_of_either_task_translates_with_both(run, training, generate, tmp_path):
    log = run(
        "fairseq-train", *training(tmp_path, "--max-epoch", 1), "--task", "node_translation", "--eval-bleu"
    )
    assert "valid_bleu" in log and "Depth of" not in log
    path = tmp_path / "checkpoint_last.pt"
    same(generate(path=path), generate(path=path, task="node_translation"))


def test_tolerance_sweep(run, corpus, checkpoint, tmp_path):
    command = ("scripts/tolerance_sweep.py", corpus, "--path", checkpoint, "--out", tmp_path / "sweep")
    settings = ("--solvers", "bosh3", "--tolerances", "0.1", "--grids", "rk4:2")
    output = run("python", *command, *settings, "--", "--cpu", "--beam", 1, "--max-len-b", 8)
    assert "| bosh3 | 0.1 |" in output and "| rk4 | 2 |" in output
    assert "another folder" in run.fails("python", *command, *settings, "--", "--cpu", "--beam", 2)
