"""The reward function of the recipe smollm2_sums; one_digit_sums.jsonl has the questions."""


def correct(completions: list[str], answer: list[str], **columns: list[str]) -> list[float]:
    """Return 1 for each completion that is its row's answer."""
    pairs = zip(completions, answer, strict=True)
    return [float(text.strip(" .\n") == right) for text, right in pairs]
