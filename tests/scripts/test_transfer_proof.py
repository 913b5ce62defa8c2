"""The benchmark of transfer, as small as it goes: some of its runs, and both tables."""

import re

import pytest

from pipeline.commands import sweep
from pipeline.config.cli import parse
from scripts.proofs import transfer

TINY = "--max-steps 3 --eval-tasks-per-domain 2 --tasks-per-step 3 --validation-steps 0 "
TINY += "--warm-start-steps 1 --warm-start-batch-size 3 --max-turns 5 --max-tokens-per-turn 12 "
TINY += "--tasks-per-domain 4 --num-generations 2"


@pytest.mark.proof
def test_the_benchmark_compares_a_remedy_and_mixed_training(tmp_path, capsys):
    flags = ["--quick", "--seeds", "1", "--rows", "0", "5", "7"]
    flags += ["--output-dir", str(tmp_path / "out"), "--json", str(tmp_path / "figures.json")]
    code = transfer.main([*flags, "--", *TINY.split()])
    said = capsys.readouterr()
    assert code == 0, said
    first, second = re.findall(r"(?:^\|.*\n)+", said.out, re.MULTILINE)
    names = [line.split("|")[1].strip() for line in first.splitlines()[2:]]
    assert names == [
        "airline, retail, telecom",
        "airline, retail, telecom; replay 0.1, advantages x 4 / 2 / 1",
        "mixed",
    ]
    assert [line.split("|")[1].strip() for line in second.splitlines()[2:]] == names[1:]
    number = r"[+-]?\d+\.\d"
    numbers = re.compile(rf"-|(\*\*)?{number} \({number} to {number}\) \[[+-]?\d+\](\*\*)?")
    for line in [*first.splitlines()[2:], *second.splitlines()[2:]]:
        for cell in line.split("|")[3:-1]:
            assert numbers.fullmatch(cell.strip()), cell
    assert "mixed: average_accuracy" in (tmp_path / "figures.json").read_text()


@pytest.mark.parametrize("settings", transfer.ROWS.values(), ids=list(transfer.ROWS))
def test_every_row_is_another_setting_that_the_command_line_takes(settings):
    recipe = ["--config", "forgetting"]
    changed = parse([*recipe, *sweep.flags_of(settings)]) != parse(recipe)
    assert changed == bool(settings)
