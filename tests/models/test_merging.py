import pytest
import torch

from pipeline.models.merging import merged


def weights(*numbers: float) -> list[torch.Tensor]:
    """Two parameters: a row of four, and a matrix of one."""
    values = torch.tensor(numbers, dtype=torch.float64)
    return [values[:4], values[4:].reshape(1, 1)]


START = weights(1.0, 1.0, 1.0, 1.0, 0.0)
# The task vectors are [0.5, 0, -0.1, 0, 2] and [-0.3, 0, -0.8, 0.1, -4].
EXPERTS = [weights(1.5, 1.0, 0.9, 1.0, 2.0), weights(0.7, 1.0, 0.2, 1.1, -4.0)]


@pytest.mark.parametrize(
    ("method", "weight", "density", "expected"),
    [
        ("task_arithmetic", 1.0, 0.2, [1.2, 1.0, 0.1, 1.1, -2.0]),
        ("task_arithmetic", None, 0.2, [1.1, 1.0, 0.55, 1.05, -1.0]),  # the mean of the experts
        # Of each vector 2 of 5 values: 0.5 and 2; -0.8 and -4, whose sign wins against 2.
        ("ties", None, 0.4, [1.5, 1.0, 0.2, 1.0, -4.0]),
        ("ties", 0.5, 0.4, [1.25, 1.0, 0.6, 1.0, -2.0]),
        # All values: -0.1 and -0.8 have one sign and give their mean.
        ("ties", None, 1.0, [1.5, 1.0, 0.55, 1.1, -4.0]),
        ("ties", None, 0.01, [1.0, 1.0, 1.0, 1.0, -4.0]),  # at least one value of each
    ],
)
def test_merged_weights_are_those_by_hand(
    method: str, weight: float | None, density: float, expected: list[float]
) -> None:
    row, matrix = merged(START, EXPERTS, method, weight, density)
    assert matrix.shape == (1, 1)
    found = torch.cat([row, matrix.flatten()])
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_ties_agrees_with_peft_on_one_tensor() -> None:
    from peft.utils.merge_utils import ties

    generator = torch.Generator().manual_seed(1)
    vectors = list(torch.randn(3, 40, 25, generator=generator, dtype=torch.float64))
    start = torch.zeros(40, 25, dtype=torch.float64)
    (found,) = merged([start], [[vector] for vector in vectors], "ties", 0.7)
    expected = ties(vectors, torch.full((3,), 0.7, dtype=torch.float64), 0.2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)
