"""Transfer metrics by hand, estimators by enumeration, intervals by what they must cover."""

from itertools import combinations

import numpy as np
import pytest

from pipeline.evaluation.transfer_metrics import (
    RESAMPLES,
    Stages,
    area_under_curve,
    average_accuracy,
    backward_transfer,
    estimate,
    forgetting,
    forward_transfer,
    learning_efficiency,
    pass_at_k,
    pass_hat_k,
    resampled,
    stage_gain,
    succeeded,
    total_gain,
    wilson,
)

# A row for each point (before, after stages 1 to 3), a column for each of three domains.
MATRIX = np.array(
    [[[0.30, 0.40, 0.50], [0.80, 0.40, 0.60], [0.70, 0.90, 0.60], [0.65, 0.85, 0.95]]]
)
IN_ORDER = Stages(num_columns=3, own=[frozenset({0}), frozenset({1}), frozenset({2})])


def test_a_trial_succeeds_at_the_threshold_up_to_the_rounding_of_a_sum():
    assert sum([0.1] * 10) < 1 and succeeded(sum([0.1] * 10), 1.0)
    assert [succeeded(reward, -3.5) for reward in (-3.6, -3.5, 0, 1e30)] == [False, *[True] * 3]
    assert not succeeded(0.999, 1.0) and not succeeded(-1e-12, 0.0)


@pytest.mark.parametrize("share", [-3.5, 1.001, float("nan")])
def test_a_mean_of_rewards_has_no_interval_of_a_share(share):
    with pytest.raises(ValueError, match="not between 0 and 1"):
        wilson(share, 20)


def test_backward_transfer_is_the_end_minus_the_domains_own_stage():
    # ((.65 - .80) + (.85 - .90)) / 2; the last domain has nothing after it
    assert backward_transfer(MATRIX, IN_ORDER) == pytest.approx([-0.10])
    assert backward_transfer(MATRIX, IN_ORDER, column=0) == pytest.approx([-0.15])
    assert backward_transfer(MATRIX, IN_ORDER, column=2) is None


def test_forward_transfer_is_what_a_domain_had_before_its_stage_minus_the_start():
    # ((.40 - .40) + (.60 - .50)) / 2; the first domain has nothing before it
    assert forward_transfer(MATRIX, IN_ORDER) == pytest.approx([0.05])
    assert forward_transfer(MATRIX, IN_ORDER, column=2) == pytest.approx([0.10])
    assert forward_transfer(MATRIX, IN_ORDER, column=0) is None


def test_forgetting_is_the_best_of_earlier_points_minus_the_end():
    assert forgetting(MATRIX, IN_ORDER) == pytest.approx([(0.15 + 0.05) / 2])
    peak = MATRIX.copy()
    peak[0, 2, 0] = 0.99  # better after another domain's stage than after its own
    assert forgetting(peak, IN_ORDER, column=0) == pytest.approx([0.34])
    assert backward_transfer(peak, IN_ORDER, column=0) == pytest.approx([-0.15])


def test_what_got_better_is_forgotten_less_than_nothing():
    better = MATRIX.copy()
    better[0, 3, 0] = 0.90
    assert forgetting(better, IN_ORDER, column=0) == pytest.approx([-0.10])


def test_a_stage_in_parts_counts_from_its_last_part():
    parts = Stages(num_columns=2, own=[frozenset({0}), frozenset({0}), frozenset({1})])
    assert backward_transfer(MATRIX[..., :2], parts) == pytest.approx([0.65 - 0.70])


def test_gains_and_accuracy():
    assert average_accuracy(MATRIX, IN_ORDER) == pytest.approx([(0.65 + 0.85 + 0.95) / 3])
    assert stage_gain(MATRIX, IN_ORDER) == pytest.approx([(0.50 + 0.50 + 0.35) / 3])
    assert total_gain(MATRIX, IN_ORDER) == pytest.approx([(0.35 + 0.45 + 0.45) / 3])
    assert learning_efficiency(MATRIX, IN_ORDER, 5000) == pytest.approx([1.25 / 3 / 5])


def test_one_stage_of_all_domains_has_gains_but_no_transfer():
    mixed = Stages(num_columns=3, own=[frozenset({0, 1, 2})])
    matrix = MATRIX[:, [0, 3]]
    assert stage_gain(matrix, mixed) == pytest.approx([1.25 / 3])
    assert backward_transfer(matrix, mixed) is None
    assert forward_transfer(matrix, mixed) is None
    assert forgetting(matrix, mixed) is None


def test_a_domain_that_comes_again_counts_from_its_last_stage():
    again = Stages(num_columns=2, own=[frozenset({0}), frozenset({1}), frozenset({0})])
    # column 0 is trained last of all; only column 1 can have lost
    assert backward_transfer(MATRIX[..., :2], again) == pytest.approx([-0.05])
    assert forward_transfer(MATRIX[..., :2], again) == pytest.approx([0.0])


def test_a_domain_that_is_never_trained_shows_forward_transfer_alone():
    two = Stages(num_columns=3, own=[frozenset({0}), frozenset({1})])
    matrix = MATRIX[:, :3]
    assert forward_transfer(matrix, two, column=2) == pytest.approx([0.10])
    assert backward_transfer(matrix, two) == pytest.approx([-0.10])


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


@pytest.mark.parametrize("wrong", [(1, 2, 3), (1, 2, 0), (3, 2, 1), (-1, 2, 1)])
def test_estimators_refuse_more_than_the_trials_that_there_are(wrong):
    for estimator in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match="trials, k = "):
            estimator(*wrong)


def test_the_first_sample_is_the_number_itself():
    totals = np.random.default_rng(0).random((2, 3, 50))
    samples = resampled(totals, np.ones_like(totals), "desk")
    assert samples.shape == (RESAMPLES + 1, 3)
    assert samples[0] == pytest.approx(totals.mean(axis=(0, 2)))


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation():
    totals = np.random.default_rng(1).random((1, 1, 400))
    found = estimate(resampled(totals, np.ones_like(totals), "desk")[:, 0])
    half = 1.96 * totals.std() / 20
    assert found.value - found.low == pytest.approx(half, rel=0.1)
    assert found.high - found.value == pytest.approx(half, rel=0.1)


def test_points_are_compared_in_pairs_so_that_equal_ones_have_no_difference():
    totals = np.random.default_rng(2).random((1, 1, 60)).repeat(2, axis=1)
    samples = resampled(totals, np.ones_like(totals), "desk")
    difference = estimate(samples[:, 1] - samples[:, 0])
    assert (difference.low, difference.high) == (0, 0)
    alone = estimate(samples[:, 0])
    assert alone.high - alone.low > 0.1


def test_seeds_that_disagree_widen_the_interval():
    close, far = np.full((3, 1, 40), 0.5), np.full((3, 1, 40), 0.5)
    far[0], far[2] = 0.2, 0.8
    for totals, width in ((close, 0.0), (far, 0.5)):
        found = estimate(resampled(totals, np.ones_like(totals), "desk")[:, 0])
        assert found.value == pytest.approx(0.5)
        assert found.high - found.low >= width
        these = estimate(resampled(totals, np.ones_like(totals), "desk", over_seeds=False)[:, 0])
        assert (these.low, these.high) == pytest.approx((0.5, 0.5))


def test_ratios_are_of_sums_and_undefined_without_a_call():
    # two tasks: 3 good calls of 4, 1 of 1; at the second point none at all
    totals = np.array([[[3.0, 1.0], [0.0, 0.0]]])
    counts = np.array([[[4.0, 1.0], [0.0, 0.0]]])
    samples = resampled(totals, counts, "desk")
    assert samples[0, 0] == pytest.approx(4 / 5)
    found = estimate(samples[:, 1])
    assert np.isnan([found.value, found.low, found.high]).all()


def test_the_interval_is_wilsons():
    assert wilson(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson(1.0, 10) == pytest.approx((0.72247, 1.0), abs=1e-5)
