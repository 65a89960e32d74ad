"""The parity study: diagnostics against what they are defined as, a grid that goes on, and its report."""

import csv
import dataclasses
import itertools
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lib import parity_grid, parity_report
from lib.parity_diagnostics import Diagnosis, diagnose
from lib.parity_grid import Cell
from lib.parity_solution import SCALE, exact_model

from fairseq_node.tasks.parity import ParityConfig, ParityTask, encode

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def task():
    return ParityTask(ParityConfig(parity_max_length=64))


def test_diagnosis_of_the_exact_solution(task):
    model = exact_model(task)
    for length in (3, 8, 64):
        seen = diagnose(task, model, length, strings=100)
        assert seen.strings == min(100, 2**length) and seen.accuracy == 100
        assert (seen.nfe, seen.nfe_std, seen.unfinished) == (2, 0, 0)  # an Euler step in each of two blocks
        assert seen.arclength > 0 and seen.sensitivity_probability == pytest.approx(1)
        # The mark of 1 / N is averaged over the even tokens or the odd ones, and every flip moves it.
        tokens = length + 1
        change = (1 / (tokens // 2) + 1 / (tokens - tokens // 2)) / tokens
        assert seen.sensitivity == pytest.approx(2 * SCALE * change, rel=0.02)


def test_diagnosis_by_hand(task):
    """All strings of four bits: loss, accuracy, and a flip of the bits that the library chose."""
    torch.manual_seed(0)
    model = exact_model(task)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    seen = diagnose(task, model, 4)
    odds = {}
    with torch.no_grad():
        for bits in map("".join, itertools.product("01", repeat=4)):
            source = encode(bits, task.dictionary)[None]
            begin = torch.full((1, 1), task.dictionary.eos())
            odds[bits] = model(source, torch.tensor([5]), begin)[0][0, 0].double().log_softmax(0)
    even, odd = task.dictionary.index("even"), task.dictionary.index("odd")
    answer = {bits: odd if bits.count("1") % 2 else even for bits in odds}
    right = [int(values.argmax()) == answer[bits] for bits, values in odds.items()]
    assert seen.strings == 16 and seen.accuracy == pytest.approx(100 * sum(right) / 16)
    loss = -sum(float(values[answer[bits]]) for bits, values in odds.items()) / 16 / math.log(2)
    assert seen.loss == pytest.approx(loss, rel=1e-4)
    changes = {}
    for bits, values in odds.items():
        others = [bits[:i] + "10"[int(bits[i])] + bits[i + 1 :] for i in range(4)]
        margins = [odds[text][odd] - odds[text][even] for text in others]
        changes[bits] = [abs(float(values[odd] - values[even] - margin)) for margin in margins]
    assert sum(map(min, changes.values())) / 16 <= seen.sensitivity * (1 + 1e-4)
    assert seen.sensitivity <= sum(map(max, changes.values())) / 16 * (1 + 1e-4)


def test_grid():
    cells = parity_grid.grid(
        ["lstm", "node-composed"], [2, 4], ["none", "arclength", "kinetic"], [0.1, 0.01], [1, 2], 10
    )
    # A plain model has no penalty; seeds x lengths x (lstm + node with (none + 2 penalties x 2 weights)).
    assert len(cells) == len(set(cells)) == 2 * 2 * (1 + 5)
    assert {cell.penalty for cell in cells if cell.architecture == "lstm"} == {"none"}
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    assert len({cell.name for cell in cells}) == len(cells)
    everything = parity_grid.grid(
        *(parity_grid.ARCHITECTURES, parity_grid.MAX_LENGTHS, parity_grid.PENALTIES, parity_grid.WEIGHTS),
        *(parity_grid.SEEDS, parity_grid.UPDATES),
    )
    assert len({cell.name for cell in everything}) == len(everything)


def test_every_architecture_is_one_of_fairseq():
    from fairseq import options

    import fairseq_node  # noqa: F401

    for name in parity_grid.ARCHITECTURES:
        for penalty in ("none", "kinetic") if parity_grid.has_path(name) else ("none",):
            arguments = Cell(name, 4, penalty, 0.1, 1, 10).arguments(Path("unused"))
            args = options.parse_args_and_arch(options.get_training_parser(), input_args=arguments)
            assert (args.parity_max_length, args.seed, args.parity_seed) == (4, 1, 1)
            assert args.parity_train_size == 10 * args.batch_size


def result(cell, accuracy, nfe=math.nan, arclength=math.nan):
    lengths = [
        Diagnosis(length, 8, accuracy, 0.5, nfe, 1.0, arclength, 0.0, 3 / length, 0.1)
        for length in parity_grid.LENGTHS
        if length <= 2 * cell.max_length
    ]
    return {
        **dataclasses.asdict(cell),
        "seconds": 1.0,
        "lengths": [dataclasses.asdict(seen) for seen in lengths],
    }


def rows(table):
    lines = [[entry.strip() for entry in line.strip("|").split("|")] for line in table.splitlines()]
    return [dict(zip(lines[0], line)) for line in lines[2:]]


@pytest.fixture
def results():
    made = []
    for seed, accuracy in ((1, 100.0), (2, 99.0), (3, 50.0)):
        made.append(result(Cell("lstm", 4, "none", 0.0, seed, 10), 100))
        made.append(result(Cell("transformer-2", 4, "none", 0.0, seed, 10), 100))
        made.append(result(Cell("transformer-2", 8, "none", 0.0, seed, 10), accuracy))
        made.append(result(Cell("node-composed", 4, "none", 0.0, seed, 10), accuracy, 20.0, 5.0))
        made.append(
            result(Cell("node-composed", 4, "arclength", 0.1, seed, 10), accuracy - 1, 18.0, 3.0 + seed)
        )
    return made


def test_tables(results):
    table = rows(parity_report.results_table(results))
    assert [row["architecture"] for row in table] == ["lstm", *["transformer-2"] * 2, *["node-composed"] * 2]
    assert table[2]["accuracy at N, %"] == "83.0 ± 28.6" and table[2]["learned"] == "2 of 3"
    assert (table[0]["NFE at N"], table[3]["NFE at N"]) == ("-", "20.0 ± 0.0")
    reach = {row["architecture"]: list(row.values())[2:] for row in rows(parity_report.reach_table(results))}
    assert reach == {"lstm": ["4", "none seen"], "transformer-2": ["4", "8"], "node-composed": ["none", "4"]}
    (penalty,) = rows(parity_report.penalty_table(results))
    assert penalty["penalty"] == "arclength 0.1" and penalty["pairs"] == "3"
    assert (penalty["accuracy, points"], penalty["NFE"]) == ("-1.00 ± 0.00", "-2.00 ± 0.00")
    assert penalty["arclength"] == "0.0 ± 1.0"
    (single,) = rows(parity_report.results_table(results[:1]))
    assert single["accuracy at N, %"] == "100.0"  # no spread of one seed
    assert "no cell" in parity_report.penalty_table(results[:1]).lower()


def test_report(results, tmp_path):
    report = parity_report.write_report(results, tmp_path, "the command").read_text()
    assert "`the command`: 15 trainings" in report
    for name in parity_report.PLOTS:
        assert f"({name}.svg)" in report
        drawn = (tmp_path / f"{name}.svg").read_text()
        assert "<svg" in drawn and drawn.count("<path") > 10
    with (tmp_path / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == sum(len(entry["lengths"]) for entry in results)
    assert table[0]["length"] == "1" and float(table[0]["sensitivity"]) == 3
    again = tmp_path / "again"
    again.mkdir()
    parity_report.write_report(results, again, "the command")
    for file in again.iterdir():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file.name


def test_a_seed_that_diverged_is_counted_and_in_no_mean(results, tmp_path):
    gone = {**result(Cell("transformer-2", 4, "none", 0.0, 4, 10), 0), "diverged": "gradients", "lengths": []}
    penalised = {**gone, "architecture": "node-composed", "penalty": "arclength", "weight": 0.1}
    every = [*results, gone, penalised, {**penalised, "max_length": 8}]
    lstm, two, _, _, penalty, only = rows(parity_report.results_table(every))
    assert (lstm["diverged"], lstm["learned"]) == ("-", "3 of 3")
    assert (two["seeds"], two["accuracy at N, %"], two["learned"]) == ("4", "100.0 ± 0.0", "3 of 4")
    assert two["diverged"] == penalty["diverged"] == only["diverged"] == "1"
    assert (only["accuracy at N, %"], only["learned"]) == ("-", "0 of 1")
    reach = {row["architecture"]: list(row.values())[2:] for row in rows(parity_report.reach_table(every))}
    assert reach["lstm"] == ["4", "none seen"] and reach["transformer-2"] == ["none", "4"]
    assert parity_report.penalty_table(every) == parity_report.penalty_table(results)
    for number, some in enumerate((every, [gone])):
        out = tmp_path / str(number)
        out.mkdir()
        parity_report.write_report(some, out, "the command")
        with (out / "results.csv").open() as file:
            (row,) = [row for row in csv.DictReader(file) if row["diverged"] and row["penalty"] == "none"]
        assert row["diverged"] == "gradients" and row["seed"] == "4"


def study(*arguments, **options):
    command = [sys.executable, ROOT / "scripts" / "parity_study.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, **options)


def test_study_trains_what_is_missing(tmp_path):
    """A node model with a penalty and a baseline, a few updates each; one result is there already."""
    out = tmp_path / "study"
    grid = ["--architectures", "lstm,tied-2", "--max-lengths", 2, "--penalties", "arclength,none"]
    grid += ["--weights", 0.1, "--seeds", 1, "--updates", 3, "--out", out, "--jobs", 1]
    dry = study(*grid, "--dry-run")
    commands = [shlex.split(line) for line in dry.stdout.splitlines()]
    assert [command[0] for command in commands] == ["fairseq-train"] * 3 and not out.exists()
    assert ["--path-penalty", "arclength", "--path-weight", "0.1"] == commands[1][
        (at := commands[1].index("--path-penalty")) : at + 4
    ]

    there = Cell("tied-2", 2, "none", 0.0, 1, 3)
    file = parity_grid.result_file(out, there)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(result(there, 77.0, 2.0, 1.0)))
    done = study(*grid)
    assert done.returncode == 0, done.stderr
    assert "3 trainings, 1 of them done" in done.stderr
    results = parity_report.read_results(out)
    assert len(results) == 3 and not list(out.glob("work/*")) and not list(out.glob("cells/*.part"))
    assert parity_report.at(json.loads(file.read_text()), 2)["accuracy"] == 77
    trained = next(entry for entry in results if entry["penalty"] == "arclength")
    assert [seen["length"] for seen in trained["lengths"]] == [1, 2, 3, 4]
    assert parity_report.at(trained, 4)["nfe"] == 2
    report = (out / "report.md").read_text()
    assert "3 trainings" in report and "77.0" in report


def test_a_training_that_diverges_is_a_result(tmp_path):
    cell = Cell("tied-2", 2, "none", 0.0, 1, 3)
    out = tmp_path / "study"
    script = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "scripts")!r}]
from pathlib import Path
from lib.parity_grid import Cell, run_cell
sensible = Cell.arguments
Cell.arguments = lambda cell, folder: [*sensible(cell, folder), "--lr", "1e38"]
run_cell(Cell("tied-2", 2, "none", 0.0, 1, 3), Path({str(out)!r}))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600, cwd=ROOT)
    (diverged,) = parity_report.read_results(out)
    assert diverged["diverged"] == "gradients are Nan/Inf" and diverged["lengths"] == []
    assert parity_grid.pending(out, [cell]) == [] and not list(out.glob("work/*"))
    assert parity_report.finished([diverged]) == []


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--architectures", "rnn"], "'rnn' is not one of lstm, transformer-1"),
        (["--max-lengths", "5"], "5 is not one of"),
        (["--weights", "0"], "0.0 is too small"),
        (["--seeds", "one"], "is no list such as 1,2"),
        (["--report-only"], "has no results; train first"),
    ],
)
def test_bad_arguments(arguments, words, tmp_path, monkeypatch, capsys):
    import parity_study

    monkeypatch.setattr(sys, "argv", ["parity_study.py", "--out", str(tmp_path / "out"), *arguments])
    with pytest.raises(SystemExit) as stopped:
        parity_study.main()
    assert words in capsys.readouterr().err + str(stopped.value)
