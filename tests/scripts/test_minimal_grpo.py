"""The algorithm in one file runs, and its update is GRPO's: weights move where groups differ."""

import re

from scripts import minimal_grpo


def test_two_steps_of_grpo_after_a_short_warm_start(capsys):
    flags = ["--domain", "airline", "--warm-start-steps", "60", "--steps", "2"]
    rate = minimal_grpo.main(flags)
    assert 0 <= rate <= 1
    said = capsys.readouterr().out
    steps = re.findall(r"^step (\d): reward (\S+), groups with signal (\d+)%, loss", said, re.M)
    assert [step for step, _, _ in steps] == ["1", "2"]
    assert all(int(signal) > 0 for _, _, signal in steps), "nothing was learnt from"
