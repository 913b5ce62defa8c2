"""The warm start: its rows are what the policy will see, with labels on what it says."""

import json
import re
from importlib import import_module
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from transformers import get_scheduler

from pipeline.common.errors import UserError
from pipeline.config.cli import flag, parse
from pipeline.config.domain_names import EMBEDDED_DOMAINS
from pipeline.config.settings import Config, RolloutSettings
from pipeline.environments.demonstrations import warm_start_demonstrations
from pipeline.environments.discovery import tool_schemas
from pipeline.environments.domains import Domain
from pipeline.environments.experts import run_expert
from pipeline.preflight.parts import prepare
from pipeline.rollout.limits import check_limits
from pipeline.rollout.rollout import RolloutRequest
from pipeline.training.demonstration_checks import check_demonstrations
from pipeline.training.sft import (
    IGNORED,
    Schedule,
    encode,
    sft_examples,
    share_of,
    supervised_rate_at,
)
from tests.support.helpers import (
    Desk,
    ScriptedSampler,
    call,
    chat,
    embedded,
    environments_of,
    rollout_of,
    say,
    tokenizer,
)
from tests.support.messages import refusal, says

DOMAINS = embedded()
ENVIRONMENTS = environments_of(DOMAINS)


def config(seed=1, domains=EMBEDDED_DOMAINS, environments=None, files=None, model="tiny", **warm):
    own = {"environments": environments or {}, "demonstrations": files or {}}
    warm.setdefault("learning_rate", 2e-3)
    return Config.model_validate(
        {
            "model": {"model": model},
            "data": {"domains": list(domains), **own},
            "run": {"seed": seed, "output_dir": "unused"},
            "warm_start": {"steps": 4, "batch_size": 6, "warmup_steps": 1, **warm},
        }
    )


def rows_of(settings):
    return examples_of(settings, {name: DOMAINS[name] for name in settings.data.domains})


def examples_of(settings, domains):
    return sft_examples(settings, chat(), warm_start_demonstrations(settings, domains))


# Rows


def test_labels_stand_exactly_on_what_the_assistant_says():
    messages = [
        {"role": "system", "content": "desk"},
        {"role": "user", "content": "hello"},
        call("look", item="lamp"),
        {"role": "tool", "name": "look", "content": '{"lamp": "seen"}'},
        say("which one?"),
        {"role": "user", "content": "the red one"},
        say("Done."),
    ]
    row = encode(chat(), messages, [])
    trained = [label for label in row["labels"] if label != IGNORED]
    assert tokenizer().decode(trained) == (
        '<tool_call>\n{"name": "look", "arguments": {"item": "lamp"}}\n</tool_call><|im_end|>'
        "which one?<|im_end|>Done.<|im_end|>"
    )
    assert tokenizer().decode(row["input_ids"]) == (
        "<|im_start|>system\ndesk<|im_end|><|im_start|>user\nhello<|im_end|>"
        '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {"item": "lamp"}}\n'
        '</tool_call><|im_end|><|im_start|>tool\n{"lamp": "seen"}<|im_end|>'
        "<|im_start|>assistant\nwhich one?<|im_end|>"
        "<|im_start|>user\nthe red one<|im_end|><|im_start|>assistant\nDone.<|im_end|>"
    )
    pairs = zip(row["input_ids"], row["labels"], strict=True)
    assert all(label in (IGNORED, token) for token, label in pairs)


@pytest.mark.parametrize("domain", EMBEDDED_DOMAINS)
def test_a_row_holds_the_tokens_of_the_rollout_that_says_the_same(domain):
    module = import_module(f"pipeline.environments.embedded.{domain}")
    environment = ENVIRONMENTS[domain]
    tasks = module.generate_tasks(3, 30, "train", "medium")
    played = [run_expert(environment(), module.expert, task, 0.5)[0] for task in tasks]
    scripts = {
        n: [m for m in messages if m["role"] == "assistant"] for n, messages in enumerate(played)
    }
    rollout = rollout_of(ScriptedSampler(scripts), chat(), {domain: environment}, RolloutSettings())
    trajectories = rollout([RolloutRequest(task=t, trial=0, key=n) for n, t in enumerate(tasks)])
    for messages, trajectory in zip(played, trajectories, strict=True):
        row = encode(chat(), messages, tool_schemas(environment))
        assert row["input_ids"] == trajectory.prompt_ids + trajectory.completion_ids
        labelled = [label != IGNORED for label in row["labels"]]
        assert labelled == [False] * len(trajectory.prompt_ids) + trajectory.loss_mask


def test_rows_are_as_many_as_the_steps_need_and_the_same_every_time():
    rows = rows_of(config(seed=1))
    assert len(rows) == 24
    assert rows == rows_of(config(seed=1))
    assert rows != rows_of(config(seed=2))
    assert len({tuple(row["input_ids"]) for row in rows}) == 24


def by_ids(row):
    return row["input_ids"]


@pytest.mark.parametrize("domain", EMBEDDED_DOMAINS)
def test_the_demonstrations_are_the_experts_who_break_rules_in_their_share(domain):
    module = import_module(f"pipeline.environments.embedded.{domain}")
    tools = tool_schemas(ENVIRONMENTS[domain])
    rewards = {}
    for share in (1.0, 0.3):
        played = [
            run_expert(ENVIRONMENTS[domain](), module.expert, task, share, 1)
            for task in module.generate_tasks(0, 80, "train", "medium")
        ]
        rows = rows_of(config(domains=[domain], rule_share=share, steps=10, batch_size=8))
        expected = [encode(chat(), messages, tools) for messages, _ in played]
        assert sorted(rows, key=by_ids) == sorted(expected, key=by_ids)
        rewards[share] = [reward for _, reward in played]
    assert rewards[1.0] == [1.0] * 80
    assert 0.2 < sum(rewards[0.3]) / 80 < 0.7


def check_all(settings, domains):
    """What a run would say of its demonstrations, and of the limits that they need."""
    notes, beyond = check_demonstrations(
        settings, domains, warm_start_demonstrations(settings, domains), chat()
    )
    return notes + check_limits(settings.rollout, beyond, {})


def test_a_domain_without_an_expert_needs_demonstrations_or_no_warm_start():
    bank = {"bank": Domain(name="bank", environment=Desk)}
    with pytest.raises(UserError) as refused:
        check_all(config(), bank)
    says(str(refused.value), "demonstrations: none of bank", "expert(agent, goal)")
    says(str(refused.value), "--demonstrations '{bank: FILE}'", "set --warm-start-steps 0")
    assert check_all(config(steps=0), bank) == []
    says(refusal(check_all, config(), embedded("airline") | bank), "none of bank, ")


def test_a_pretrained_model_is_warned_of_a_domain_without_demonstrations():
    bank = {"bank": Domain(name="bank", environment=Desk)}
    (note,) = check_all(config(model="some/model"), embedded("airline") | bank)
    says(note, "demonstrations: none of bank", "--demonstrations '{bank: FILE}'")


# Demonstrations of one's own

LOOK = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def write(path, *lines):
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_a_line_without_tools_has_those_of_the_environment(tmp_path):
    path = write(tmp_path / "own.jsonl", GOOD, {**GOOD, "tools": LOOK})
    settings = config(domains=["airline"], files={"airline": str(path)}, steps=1, batch_size=2)
    texts = [tokenizer().decode(row["input_ids"]) for row in rows_of(settings)]
    said = {text.partition("<|im_end|>")[0] for text in texts}
    names = " ".join(s["function"]["name"] for s in tool_schemas(ENVIRONMENTS["airline"]))
    assert said == {f"<|im_start|>system\ntools: {names}", "<|im_start|>system\ntools: look"}
    (note,) = check_all(settings, embedded("airline"))
    says(
        note,
        "demonstrations of airline",
        "tools of 1 of 2 tried",
        f"{path}, line 2",
        "leave `tools`",
    )


def test_a_file_joins_the_experts_of_the_other_domains(tmp_path):
    """With as many examples as they, whose order does not change."""
    path = write(tmp_path / "own.jsonl", GOOD, {"messages": [GOOD["messages"][0], say("yes")]})
    rows = rows_of(config(files={"retail": str(path)}))
    texts = [tokenizer().decode(row["input_ids"]) for row in rows]
    own = [text.rpartition("assistant\n")[2] for text in texts if "user\nhi<" in text]
    assert sorted(own) == ["hello<|im_end|>"] * 4 + ["yes<|im_end|>"] * 4
    pairs = list(zip(rows, rows_of(config()), strict=True))
    assert sum(row == other for row, other in pairs) == 16


LONG = {"messages": [GOOD["messages"][0], say("x" * 50)]}
MANY = {"messages": [GOOD["messages"][0], *[call("look", item="lamp")] * 9, say("x")]}
RESULT = {"role": "tool", "name": "look", "content": "y" * 65}
FULL = {"messages": [GOOD["messages"][0], call("look", item="lamp"), RESULT, say("x")]}


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        (LONG, "max_tokens_per_turn 51"),
        (MANY, "max_turns 10"),
        (FULL, "max_tool_result_tokens 65"),
        ({"messages": [{"role": "user", "content": "z" * 300}, say("x")]}, "max_tokens 3"),
    ],
)
def test_demonstrations_that_do_not_fit_into_a_rollout_are_refused_or_told(tmp_path, line, needed):
    """With their line and the setting to raise: refused if they are more than a tenth."""
    path = write(tmp_path / "own.jsonl", *[GOOD] * 8, line)
    settings = config(domains=["airline"], files={"airline": str(path)})
    message = refusal(check_all, settings, embedded("airline"))
    name, _, number = needed.partition(" ")
    says(
        message,
        "1 of 9 tried demonstrations of airline",
        f"(such as {path}, line 9): needs {needed}",
    )
    assert re.search(rf"; give {flag('rollout', name)} {number}\d*", message)
    write(path, *[GOOD] * 9, line)
    (note,) = check_all(settings, embedded("airline"))
    says(note, "1 of 10 tried", f"line 10): needs {needed}", f"; give {flag('rollout', name)}")


def test_all_limits_of_all_domains_are_named_at_once_with_the_flags_that_mend_them(tmp_path):
    airline = write(tmp_path / "airline.jsonl", LONG, FULL)
    retail = write(tmp_path / "retail.jsonl", *[GOOD] * 20, MANY)
    files = {"airline": str(airline), "retail": str(retail)}
    settings = config(domains=["airline", "retail"], files=files)
    parsed = parse(["--max-tokens", "20", "--max-tokens-per-turn", "10"])
    settings = settings.changed("data", tasks_per_domain=8)
    settings = settings.model_copy(update={"rollout": parsed.rollout})
    message = refusal(prepare, settings)
    *found, last = message.removeprefix("limits are too low: ").split("; ")
    named = "max_tokens_per_turn 51 (got 10)", "max_turns 10 (got 8)", "max_tool_result_tokens 65"
    says(message, *named, "tried demonstrations of airline", "a prompt of retail has ")
    assert len(found) == 4  # demonstrations and prompts of two domains
    flags = last.removeprefix("give ").split()
    assert flags[::2] == [
        *("--max-tokens", "--max-tokens-per-turn", "--max-tool-result-tokens", "--max-turns")
    ]
    mended = settings.model_copy(update={"rollout": parse(flags).rollout})
    assert prepare(mended).warnings == []


def test_each_pass_over_the_file_takes_every_row_once_in_an_order_of_its_own(tmp_path):
    names = [chr(ord("a") + n) for n in range(5)]
    said = [{"messages": [GOOD["messages"][0], say(name)]} for name in names]
    path = write(tmp_path / "own.jsonl", *said)
    settings = config(domains=["airline"], files={"airline": str(path)}, steps=3, batch_size=4)
    rows = rows_of(settings)
    assert len(rows) == 12
    passes = [rows[0:5], rows[5:10]]
    assert [len({tuple(row["input_ids"]) for row in one}) for one in passes] == [5, 5]
    assert passes[0] != passes[1]


# Training


def test_the_learning_rate_is_that_of_transformers():
    ours = Schedule(9, batch_size=1, learning_rate=2e-3, num_warmup_steps=3)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2e-3)
    options = {"scheduler_specific_kwargs": {"min_lr_rate": 0.1}}
    schedule = get_scheduler("cosine_with_min_lr", optimizer, 3, 9, **options)
    for step in range(9):
        assert supervised_rate_at(step, ours) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def test_ranks_share_out_the_examples_of_a_step_each_once():
    examples = [{"input_ids": [number % 4, number]} for number in range(10)]
    for num_ranks, group in product((1, 2, 3), (0, 2)):
        ranks = [SimpleNamespace(rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
        found = [example for of_rank in ranks for example in share_of(examples, of_rank, group)]
        assert sorted(found, key=by_ids) == sorted(examples, key=by_ids)
