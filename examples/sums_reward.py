"""The reward function of the recipe smollm2_sums; one_digit_sums.jsonl has the questions."""

import re


def correct(completions: list[str], answer: list[str], **columns: list[str]) -> list[float]:
    """Return 1 for each completion whose last number is its row's answer."""
    numbers = [re.findall(r"\d+", text)[-1:] for text in completions]
    return [float(found == [right]) for found, right in zip(numbers, answer, strict=True)]
