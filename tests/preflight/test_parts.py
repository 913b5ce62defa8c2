"""Each part of a run is made once, and the run uses what was checked."""

import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.config.cli import parse
from pipeline.environments import demonstrations
from pipeline.environments.language_models.language_model import LanguageModel
from pipeline.models.loading import empty_model
from pipeline.rollout.rewards import load_reward_functions
from pipeline.training.sft import sft_examples
from tests.support.helpers import start_unwatched

MODULE = """
from dataclasses import replace
from pipeline.environments.embedded import airline
from pipeline.environments.embedded.airline import expert

class Desk(airline.AirlineEnvironment):
    pass

def generate_tasks(*arguments):
    return [replace(task, domain="desk") for task in airline.generate_tasks(*arguments)]

async def judged(completions, judge, **kwargs):
    return [0.5 for _ in completions]
"""
MADE = {  # how often, of the functions that make parts
    load_reward_functions: 1,
    demonstrations.warm_start_demonstrations: 1,
    demonstrations.read_demonstrations: 1,  # of sums, the domain with a file
    demonstrations.demonstrations_of: 2,  # once each domain
    empty_model: 1,
    LanguageModel.__init__: 2,  # customer and judge
}


@contextmanager
def counted_calls() -> Iterator[Counter]:
    """Count the calls of the functions of MADE, as Python starts them."""
    names = {function.__code__: function.__qualname__ for function in MADE}
    counts = Counter()
    frames = []  # a generator's frame is entered many times

    def count(frame, event, _):
        if event == "call" and frame.f_code in names and frame not in frames:
            frames.append(frame)
            counts[names[frame.f_code]] += 1

    gc.collect()  # or a generator that another test has left is closed, and counted, here
    sys.setprofile(count)
    try:
        yield counts
    finally:
        sys.setprofile(None)


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_each_part_of_a_run_is_made_once_before_the_first_episode(tmp_path, monkeypatch):
    """A run with a file of demonstrations, an expert without WORDS, a customer and a judge."""
    (tmp_path / "own_desk.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    tasks = [{"prompt": f"{n} + 1", "answer": f"{n + 1}", "scenario": "a pupil"} for n in range(12)]
    talks = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{n}"}]}
        for n in range(6)
    ]
    config = parse(
        [
            *("--domains", "desk,sums", "--output-dir", str(tmp_path / "run")),
            *("--environments", "{desk: 'own_desk:Desk'}"),
            *("--tasks", f"{{sums: {lines(tmp_path / 'sums.jsonl', tasks)}}}"),
            *("--demonstrations", f"{{sums: {lines(tmp_path / 'talks.jsonl', talks)}}}"),
            *("--reward-funcs", "own_desk:judged", "--report-to", "none"),
            *("--judge-url", "http://none.invalid", "--judge-model", "m"),
            *("--customer-url", "http://none.invalid", "--customer-model", "m"),
            *("--warm-start-steps", "2", "--tasks-per-step", "2", "--num-generations", "2"),
            *("--tasks-per-domain", "12", "--eval-tasks-per-domain", "2"),
        ]
    )
    with counted_calls() as counts:
        run = start_unwatched(config)
        examples = sft_examples(config, run.parts.chat, run.parts.demonstrations)
    run.log.close()
    assert len(examples) == config.warm_start.steps * config.warm_start.batch_size
    assert counts == {function.__qualname__: number for function, number in MADE.items()}
    assert run.learner.rollout.rewards is run.parts.rewards
