"""Where a step's time goes: what is counted, what it is divided by, and the traces."""

import pytest

from pipeline.common.errors import UserError
from pipeline.config.cli import build_parser, parse
from pipeline.training.step_metrics import rates

# Rates

TOTAL = {  # of two ranks
    **{"step_s": 20.0, "sample_s": 10.0, "environment_s": 1.0, "update_s": 6.0, "wait_s": 4.0},
    **{"episodes": 50, "sampled": 1000, "sample_tokens": 3000, "sample_padded": 4000},
    **{"update_tokens": 2400, "update_padded": 3000, "bytes": 123},
}


def test_seconds_are_means_of_ranks_tokens_are_those_of_all():
    assert rates(TOTAL, num_ranks=2) == {
        "perf/step_s": 10.0,
        "perf/sample_s": 5.0,
        "perf/environment_s": 0.5,
        "perf/update_s": 3.0,
        "perf/wait_s": 2.0,
        "perf/episodes_per_s": 5.0,
        "perf/tokens_per_s": 100.0,
        "perf/sample_tokens_per_s": 200.0,
        "perf/update_tokens_per_s": 800.0,
        "perf/sample_padding_share": 0.25,
        "perf/update_padding_share": 0.2,
        "perf/exchanged_bytes": 123,
    }


def test_a_step_without_an_update_has_no_rates_of_one():
    nothing = {"update_s": 0.0, "update_tokens": 0, "update_padded": 0}
    found = rates({**TOTAL, **nothing}, num_ranks=2)
    assert found["perf/update_tokens_per_s"] == found["perf/update_padding_share"] == 0


# The setting


def test_profile_names_steps_that_are_trained():
    config = parse(["--profile", "2,3"])
    assert config.run.profile == [2, 3]
    assert "steps with a torch.profiler trace" in build_parser(config).format_help()
    for argv, message in (
        (["--profile", "0"], "--profile: got '0'; Input should be greater than 0"),
        (["--profile", "9", "--max-steps", "8"], "profile: got step 9, but 8 are trained"),
        (["--profile", "1", "--no-grpo"], "profile: got step 1, but 0 are trained"),
    ):
        with pytest.raises(UserError, match=message):
            parse(argv)
