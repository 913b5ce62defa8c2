"""A judge without a model: its verdict depends on every character of the question.

Both sides of `tau2_export.py` use it, so that equal rewards mean equal questions. This file imports
the standard library alone.
"""

import ast
import hashlib
import json


def answer(system: str, user: str) -> str:
    """Return a judge's answer to the official question, with a result for each assertion."""
    assertions = ast.literal_eval(user.rpartition("expectedOutcomes:")[2].strip())
    digest = hashlib.sha256(f"{system}\n{user}".encode()).digest()
    results = [
        {"expectedOutcome": text, "reasoning": "by hash", "metExpectation": digest[number] % 4 > 0}
        for number, text in enumerate(assertions)
    ]
    return json.dumps({"results": results})
