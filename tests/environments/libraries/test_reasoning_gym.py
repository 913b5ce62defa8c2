"""Datasets of the real reasoning-gym as domains."""

import json
import random

import pytest

from pipeline.config.settings import Config
from pipeline.data.tasks import SPLITS
from pipeline.environments import load_domains
from pipeline.environments.task_checks import try_task
from tests.rollout.test_rollout import LIMITS
from tests.support.helpers import played, say
from tests.support.messages import refusal, says

pytest.importorskip("reasoning_gym")
DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TWO = [{"name": "chain_sum", "config": DIGIT}, {"name": "gcd", "weight": 3.0}]


def domain(name="chain_sum", **arguments):
    factory = {"factory": f"reasoning_gym:{name}", "arguments": arguments}
    data = {"domains": ["sums"], "environments": {"sums": factory}}
    return load_domains(Config.model_validate({"data": data}))["sums"]


def made(of, n=50, split="train", seed=0):
    return of.generate_tasks(seed, n, split, "medium")


def questions(tasks):
    return [task.prompt[0]["content"] for task in tasks]


def reward(of, task, message):
    environment = of.make()
    environment.reset(task.payload)
    environment.final_message = message
    return environment.get_reward()


def test_no_question_stands_twice_or_in_two_splits():
    of = domain(**DIGIT)
    by_split = {split: questions(made(of, 1000, split)) for split in SPLITS}
    every = [question for asked in by_split.values() for question in asked]
    assert len(every) == len({*every}) == 200  # all sums and differences of two digits
    assert all(len(asked) >= 10 for asked in by_split.values())


def test_tasks_are_the_same_in_any_order_of_calls_and_in_another_process():
    one, other = domain(), domain()
    held_out = made(one, 20, "test")
    assert made(other, 30) == made(one, 30)
    assert made(one, 50)[:30] == made(other, 30)
    assert made(other, 20, "test") == held_out


def test_tasks_do_not_depend_on_the_global_random_numbers():
    made_by = []
    for seed in (1, 2):
        random.seed(seed)
        made_by.append(made(domain("list_functions"), 40))
    assert made_by[0] == made_by[1]


def test_the_seed_of_the_tasks_makes_other_questions():
    of = domain()
    assert not {*questions(made(of))} & {*questions(made(of, seed=1))}


@pytest.mark.parametrize(
    ("arguments", "message", "earned"),
    [
        ({}, "{}", 1.0),
        ({}, " {}\n", 1.0),
        ({}, "So <answer>7000</answer>, no: <answer> {} </answer>.", 1.0),
        ({}, "<answer>7000</answer>, not {}", 0.0),
        ({}, "", 0.0),
        ({"answer": "-?[0-9]+"}, "first 7000, then {}.", 1.0),
        ({"answer": "-?[0-9]+"}, "{} or 7000", 0.0),
        ({"answer": "is (-?[0-9]+)"}, "7000 is {} is.", 1.0),
    ],
)
def test_the_dataset_scores_the_answer(arguments, message, earned):
    of = domain(**arguments)
    for task in made(of, 5):
        answer = json.loads(task.payload)["goal"]["answer"]
        assert reward(of, task, message.format(answer)) == earned


def test_a_part_of_a_reward_is_the_datasets_own():
    of = domain()
    (task,) = made(of, 1)
    answer = json.loads(task.payload)["goal"]["answer"]
    assert reward(of, task, f"It is {answer}") == len(answer) / len(f"It is {answer}")


def test_a_scorer_that_cannot_read_an_answer_gives_nothing():
    of = domain("prime_factorization")
    assert reward(of, made(of, 1)[0], "banana") == 0.0


def test_the_names_of_a_composite_are_families():
    tasks = made(domain("composite", datasets=TWO), 100)
    families = [task.family for task in tasks]
    assert {*families} == {"chain_sum", "gcd"}
    assert families.count("gcd") > families.count("chain_sum")
    assert {task.family for task in made(domain(family="num_terms"), 100)} == {*"23456"}


@pytest.mark.parametrize("name", ["gsm_symbolic", "graph_color"])
def test_a_level_may_be_a_number_and_an_answer_may_be_missing(name):
    of = domain(name)
    for task in made(of, 3):
        assert task.family == name
        assert try_task(of, task, "sums", 10.0, success=1.0) == ""


def test_an_episode_is_one_message():
    of = domain(**DIGIT)
    right, wrong = made(of, 2)
    answer = json.loads(right.payload)["goal"]["answer"]
    trajectories, _ = played([[say(answer)], [say("none")]], {"sums": of}, LIMITS, [right, wrong])
    assert [(t.reward, t.num_turns) for t in trajectories] == [(1.0, 1), (0.0, 1)]


def test_its_tasks_pass_the_checks_before_a_run_and_can_be_shown():
    of = domain(**DIGIT)
    tasks = made(of, 10)
    for task in tasks:
        assert try_task(of, task, "sums", 10.0, success=1.0) == ""
    conversation, earned = of.demonstrate(tasks[-1], 10.0)
    assert earned == 1.0
    assert conversation[-1]["content"] == json.loads(tasks[-1].payload)["goal"]["answer"]
    shown = {of.demonstrate(tasks[-1], 10.0, 0.0, seed)[0][-1]["content"] for seed in range(30)}
    assert len(shown) > 1


@pytest.mark.parametrize(
    ("name", "arguments", "parts"),
    [
        ("chain_smu", {}, ("no dataset chain_smu", "did you mean chain_sum?")),
        ("chain_sum", {"min_term": 1}, ("unexpected keyword argument 'min_term'", "arguments")),
        ("chain_sum", {"min_terms": 9}, ("max_terms must be >= min_terms",)),
        ("chain_sum", {"size": "many"}, ("argument size", "got 'many'")),
        (
            "chain_sum",
            {"answer": "("},
            ("argument answer: ", "a valid regular expression, got '('"),
        ),
        ("ransom_note", {}, ("ransom_note differs in each process", "PYTHONHASHSEED=0")),
        ("composite", {"datasets": [{"name": "word_ladder"}]}, ("word_ladder differs in each",)),
        ("composite", {}, ("at least one dataset",)),
        ("composite", {"datasets": [{"name": "sum"}]}, ("'sum' not registered",)),
    ],
)
def test_a_wrong_name_or_configuration_is_one_line(name, arguments, parts, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    says(refusal(domain, name, **arguments), f"got 'reasoning_gym:{name}'", *parts)
