"""One checkpoint under several solvers; tests/cli has the command itself."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from lib import sweep  # noqa: E402


def test_settings_are_overrides_of_the_model():
    chosen = sweep.settings(["bosh3"], [1.0, 0.01], ["rk4:2"])
    assert [each.name for each in chosen] == ["bosh3-1", "bosh3-0.01", "rk4-2"]
    assert chosen[1].overrides == {"node_solver": "bosh3", "node_rtol": 0.01, "node_atol": 0.01}
    assert chosen[2].overrides == {"node_solver": "rk4", "node_steps": 2}


@pytest.mark.parametrize(
    "arguments,option",
    [
        ((["rk4"], [0.1], []), "--solvers"),
        ((["bosh3"], [0.0], []), "--tolerances"),
        (([], [], ["bosh3:1"]), "--grids"),
        (([], [], ["rk4:0"]), "--grids"),
        (([], [], ["rk4"]), "--grids"),
    ],
)
def test_what_cannot_be_swept_is_named(arguments, option):
    with pytest.raises(sweep.SweepError, match=f"^{option}.*use"):
        sweep.settings(*arguments)


def test_results_are_read_tabulated_and_drawn(tmp_path):
    results = []
    for setting, bleu in zip(sweep.settings(["bosh3"], [0.1, 0.01], ["euler:1"]), (30.5, 31.25, 12.0)):
        folder = tmp_path / setting.name
        folder.mkdir()
        (folder / "log").write_text(
            "Translated 2 sentences (9 tokens) in 1.0s (2.00 sentences/s, 123.40 tokens/s)"
        )
        (folder / "generate-test.txt").write_text(f"Generate test with beam=4: BLEU = {bleu} 1/1/1/1")
        lines = [{"nfe_encoder": 8, "nfe_decoder": nfe, "node_unfinished": nfe - 8} for nfe in (8, 9)]
        (folder / "generate-test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        # What is there is not translated again: there is no checkpoint.
        results.append(sweep.run(setting, "no data", "no checkpoint", [], tmp_path))
    assert results[1] == sweep.Result("bosh3", 0.01, 31.25, 8, 8.5, 123.4, 1)
    sweep.write(results, tmp_path)
    assert "| bosh3 | 0.01 | 31.25 | 8.0 | 8.5 | 123 | 1 |" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "results.csv").read_text().splitlines()[2] == "bosh3,0.01,31.25,8,8.5,123.4,1"
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
