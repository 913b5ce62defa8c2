"""Transfer metrics by hand, estimators by enumeration, intervals by what they must cover."""

from itertools import chain, combinations

import numpy as np
import pytest

from pipeline.evaluation.transfer_metrics import (
    RESAMPLES,
    area_under_curve,
    estimate,
    mean,
    of_columns,
    of_matrix,
    pass_at_k,
    pass_hat_k,
    resampled,
    stage_gains,
    succeeded,
    wilson,
)

# A row for each point (before, after stages 1 to 3), a column for each of three domains.
MATRIX = np.array(
    [[[0.30, 0.40, 0.50], [0.80, 0.40, 0.60], [0.70, 0.90, 0.60], [0.65, 0.85, 0.95]]]
)
IN_ORDER = [{0}, {1}, {2}]  # the column that each stage trains


def backward_transfer(matrix, own):
    return of_columns(matrix, own)["backward_transfer"]


def forward_transfer(matrix, own):
    return of_columns(matrix, own)["forward_transfer"]


def forgetting(matrix, own):
    return of_columns(matrix, own)["forgetting"]


def test_a_trial_succeeds_at_the_threshold_up_to_the_rounding_of_a_sum():
    assert 0.7 + 0.2 + 0.1 < 1 and succeeded(0.7 + 0.2 + 0.1, 1.0)
    assert [succeeded(reward, -3.5) for reward in (-3.6, -3.5, 0, 1e30)] == [False, *[True] * 3]
    assert not succeeded(0.999, 1.0) and not succeeded(-1e-12, 0.0)


@pytest.mark.parametrize("share", [-3.5, 1.001, float("nan")])
def test_a_mean_of_rewards_has_no_interval_of_a_share(share):
    with pytest.raises(ValueError, match="not between 0 and 1"):
        wilson(share, 20)


def test_backward_transfer_is_the_end_minus_the_domains_own_stage():
    # ((.65 - .80) + (.85 - .90)) / 2; the last domain has nothing after it
    assert mean(backward_transfer(MATRIX, IN_ORDER).values()) == pytest.approx([-0.10])
    assert backward_transfer(MATRIX, IN_ORDER)[0] == pytest.approx([-0.15])
    assert 2 not in backward_transfer(MATRIX, IN_ORDER)


def test_forward_transfer_is_what_a_domain_had_before_its_stage_minus_the_start():
    # ((.40 - .40) + (.60 - .50)) / 2; the first domain has nothing before it
    assert mean(forward_transfer(MATRIX, IN_ORDER).values()) == pytest.approx([0.05])
    assert forward_transfer(MATRIX, IN_ORDER)[2] == pytest.approx([0.10])
    assert 0 not in forward_transfer(MATRIX, IN_ORDER)


def test_forgetting_is_the_best_of_earlier_points_minus_the_end():
    assert mean(forgetting(MATRIX, IN_ORDER).values()) == pytest.approx([(0.15 + 0.05) / 2])
    peak = MATRIX.copy()
    peak[0, 2, 0] = 0.99  # better after another domain's stage than after its own
    assert forgetting(peak, IN_ORDER)[0] == pytest.approx([0.34])
    assert backward_transfer(peak, IN_ORDER)[0] == pytest.approx([-0.15])


def test_what_got_better_is_forgotten_less_than_nothing():
    better = MATRIX.copy()
    better[0, 3, 0] = 0.90
    assert forgetting(better, IN_ORDER)[0] == pytest.approx([-0.10])


def test_a_stage_in_parts_counts_from_its_last_part():
    parts = [{0}, {0}, {1}]
    assert mean(backward_transfer(MATRIX[..., :2], parts).values()) == pytest.approx([0.65 - 0.70])


def test_gains_and_accuracy():
    found = {name: float(of[0]) for name, of in of_matrix(MATRIX, IN_ORDER, 5000).items()}
    assert found == pytest.approx(
        {
            "average_accuracy": (0.65 + 0.85 + 0.95) / 3,
            "total_gain": (0.35 + 0.45 + 0.45) / 3,
            "stage_gain": (0.50 + 0.50 + 0.35) / 3,
            "backward_transfer": -0.10,
            "forward_transfer": 0.05,
            "forgetting": 0.10,
            "learning_efficiency": 1.25 / 3 / 5,
        }
    )
    assert "learning_efficiency" not in of_matrix(MATRIX, IN_ORDER, 0)
    assert list(of_matrix(MATRIX, [], 0)) == ["average_accuracy"]


def test_one_stage_of_all_domains_has_gains_but_no_transfer():
    mixed = [{0, 1, 2}]
    matrix = MATRIX[:, [0, 3]]
    assert mean(chain(*stage_gains(matrix, mixed))) == pytest.approx([1.25 / 3])
    assert backward_transfer(matrix, mixed) == {}
    assert forward_transfer(matrix, mixed) == {}
    assert forgetting(matrix, mixed) == {}


def test_a_domain_that_comes_again_counts_from_its_last_stage():
    again = [{0}, {1}, {0}]
    # column 0 is trained last of all; only column 1 can have lost
    assert mean(backward_transfer(MATRIX[..., :2], again).values()) == pytest.approx([-0.05])
    assert mean(forward_transfer(MATRIX[..., :2], again).values()) == pytest.approx([0.0])


def test_a_domain_that_is_never_trained_shows_forward_transfer_alone():
    two = [{0}, {1}]
    matrix = MATRIX[:, :3]
    assert forward_transfer(matrix, two)[2] == pytest.approx([0.10])
    assert mean(backward_transfer(matrix, two).values()) == pytest.approx([-0.10])


def test_the_area_under_a_curve_weights_points_by_their_steps():
    curve = np.array([[0.2, 0.6, 0.8]])
    # (.2 + .6) / 2 over 10 steps, (.6 + .8) / 2 over 30
    assert area_under_curve(curve, [0, 10, 40]) == pytest.approx([(4 + 21) / 40])


@pytest.mark.parametrize("num_trials", range(1, 9))
def test_pass_estimators_equal_the_enumeration_of_all_draws(num_trials):
    for num_successes in range(num_trials + 1):
        trials = [True] * num_successes + [False] * (num_trials - num_successes)
        for k in range(1, num_trials + 1):
            draws = list(combinations(trials, k))
            assert pass_at_k(num_successes, num_trials, k) == pytest.approx(
                sum(map(any, draws)) / len(draws), abs=1e-12
            )
            assert pass_hat_k(num_successes, num_trials, k) == pytest.approx(
                sum(map(all, draws)) / len(draws), abs=1e-12
            )


def test_the_first_sample_is_the_number_itself():
    totals = np.random.default_rng(0).random((2, 3, 50))
    samples = resampled(totals, np.ones_like(totals), "desk")
    assert samples.shape == (RESAMPLES + 1, 3)
    assert samples[0] == pytest.approx(totals.mean(axis=(0, 2)))


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation():
    totals = np.random.default_rng(1).random((1, 1, 400))
    value, low, high = estimate(resampled(totals, np.ones_like(totals), "desk")[:, 0])
    half = 1.96 * totals.std() / 20
    assert value - low == pytest.approx(half, rel=0.1)
    assert high - value == pytest.approx(half, rel=0.1)


def test_points_are_compared_in_pairs_so_that_equal_ones_have_no_difference():
    totals = np.random.default_rng(2).random((1, 1, 60)).repeat(2, axis=1)
    samples = resampled(totals, np.ones_like(totals), "desk")
    assert estimate(samples[:, 1] - samples[:, 0]) == [0, 0, 0]
    _, low, high = estimate(samples[:, 0])
    assert high - low > 0.1


def test_seeds_that_disagree_widen_the_interval():
    close, far = np.full((3, 1, 40), 0.5), np.full((3, 1, 40), 0.5)
    far[0], far[2] = 0.2, 0.8
    for totals, width in ((close, 0.0), (far, 0.5)):
        value, low, high = estimate(resampled(totals, np.ones_like(totals), "desk")[:, 0])
        assert value == pytest.approx(0.5)
        assert high - low >= width
        these = estimate(resampled(totals, np.ones_like(totals), "desk", over_seeds=False)[:, 0])
        assert these == pytest.approx([0.5, 0.5, 0.5])


def test_ratios_are_of_sums_and_undefined_without_a_call():
    # two tasks: 3 good calls of 4, 1 of 1; at the second point none at all
    totals = np.array([[[3.0, 1.0], [0.0, 0.0]]])
    counts = np.array([[[4.0, 1.0], [0.0, 0.0]]])
    samples = resampled(totals, counts, "desk")
    assert samples[0, 0] == pytest.approx(4 / 5)
    assert np.isnan(samples[0, 1])
    assert estimate(samples[:, 1]) is None


def test_the_interval_is_wilsons():
    assert wilson(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson(1.0, 10) == pytest.approx((0.72247, 1.0), abs=1e-5)
