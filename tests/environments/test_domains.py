"""Domains: an embedded one and one's own are resolved alike, and serve wherever they offer it."""

import json
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from pipeline.checkpoints.run_folder import write_manifest
from pipeline.config.settings import Config, DataSettings
from pipeline.environments import load_domains
from pipeline.environments.demonstrations import demonstrations_of
from pipeline.environments.domains import generated
from pipeline.environments.experts import run_expert
from pipeline.evaluation.baselines import play_baselines
from pipeline.models.tiny import tiny_model
from pipeline.preflight.parts import prepare
from pipeline.training.sft import encode, sft_examples
from tests.support.helpers import save_tasks, tokenizer
from tests.support.messages import refusal, says

BANK = '''
import json

from pipeline.data.tasks import Task
from pipeline.environments import Agent, Outage, ToolError

WORDS = ("bank", "freeze", "Which account?", "frozen", '{"account": "')


class Customer:
    def __init__(self, account: str) -> None:
        self.account = account

    async def reply(self, message: str) -> str | None:
        return self.account if "?" in message else None


class BankEnvironment:
    """Its tool answers in plain words, its reset adds to the request."""

    async def reset(self, **row) -> str:
        self.account = json.loads(row["payload"])["goal"]["account"]
        self.user, self.frozen, self.final_message = Customer(self.account), [], ""
        return " now"

    def show(self, account: str) -> dict:
        """Show an account.

        Args:
            account: Account id.
        """
        return {"status": "open"}

    def freeze(self, account: str) -> str:
        """Freeze an account.

        Args:
            account: Account id.
        """
        if account != self.account:
            raise ToolError("no such account")
        self.frozen.append(account)
        return "frozen"

    async def get_reward(self) -> float:
        return float(self.frozen == [self.account] and self.final_message == "Done.")


def expert(agent: Agent, goal: dict) -> str:
    account = agent.ask("Which account?")
    assert agent.call("show", account=account) == {"status": "open"}
    agent.call("freeze", account=agent.decide(account, [account, "K00"]))
    return "Done."


def generate_tasks(seed, n, split, difficulty):
    prompt = ({"role": "system", "content": "bank"}, {"role": "user", "content": "freeze it"})
    return [
        Task(
            domain="bank",
            id=f"{split}-{i}",
            prompt=prompt,
            payload=json.dumps({"goal": {"account": f"K{i % 60:02d}"}, "number": f"{split}-{i}"}),
        )
        for i in range(n)
    ]
'''


def write(folder: Path, name: str, code: str = BANK) -> dict[str, str]:
    """What `environments` says of a bank in a module of this name."""
    (folder / f"{name}.py").write_text(code)
    return {"bank": f"{name}:BankEnvironment"}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Makes the settings of a run with a bank, whose module has a name of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def make(code=BANK, name="own_bank", domains=("bank",), tasks=None, **sections):
        data = {
            "domains": list(domains),
            "environments": write(tmp_path, name, code),
            "tasks": tasks or {},
            "tasks_per_domain": 6,
            "eval_tasks_per_domain": 3,
        }
        warm = {"steps": 3, "batch_size": 4, "warmup_steps": 1, "learning_rate": 2e-3}
        warm |= sections.pop("warm_start", {})
        return Config.model_validate({**sections, "data": data, "warm_start": warm})

    yield make
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


# What a module may say of its domain


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("baselines = {}", ("whose baselines is {}", "give a function")),
        ("about = 'me'", ("whose about is 'me'", "give a function")),
        ("FAMILY_SHARES = [0.5]", ("whose FAMILY_SHARES are [0.5]", "give {family: share}")),
        ("FAMILY_SHARES = {'a': 1.5}", ("whose FAMILY_SHARES are {'a': 1.5}", "from 0 to 1")),
        ("FAMILY_SHARES = {'a': 0.6, 'b': 0.6}", ("'b': 0.6}", "a sum of at most 1")),
        ("def FAMILY_SHARES(): return 1 / 0", ("FAMILY_SHARES fail (ZeroDivisionError", "line ")),
        ("def about(): return {'a': {1, 2}}", ("about() fails (TypeError", "return JSON values")),
        ("def about(): return 1 / 0", ("whose about() fails (ZeroDivisionError", "line ")),
        ("def baselines(task): return 1 / 0", ("fail on task 'test-0' (ZeroDivisionError", "line")),
        ("def baselines(task): return {'a': [3]}", ("baselines of bank", "the call 3")),
        (
            "def generate_tasks(*given): raise ValueError(f'no {given[3]} tasks')",
            ("tasks of bank: no medium tasks", "(own_bank.py, line "),
        ),
    ],
)
def test_what_a_module_says_wrongly_is_refused_in_one_line(own, code, words):
    says(refusal(prepare, own(f"{BANK}\n\n{code}\n")), *words)


SPOKEN = """

FAMILY_SHARES = {"": 1}


def about():
    return {}


def baselines(task):
    return {"pay": [("freeze", {"account": "K00"}), ("show", {"account": "K00"})]}


_made = generate_tasks


def generate_tasks(seed, n, split, difficulty):
    if difficulty == "hard":
        raise ValueError("no hard ones")
    return _made(seed, n, split, difficulty)
"""


def test_a_domain_without_tasks_of_a_difficulty_says_so(own):
    config = own(BANK + SPOKEN, curriculum={"difficulties": ["easy", "hard"]})
    says(refusal(prepare, config), "tasks of bank: no hard ones", "(own_bank.py, line ")


def test_settings_replace_the_shares_of_the_module(own):
    config = own(BANK + SPOKEN)
    (domain,) = load_domains(config).values()
    assert (domain.family_shares, domain.about()) == ({"": 1}, {})
    parts = prepare(config)
    assert [stage.family_shares for stage in parts.stages] == [{"bank": {"": 1.0}}]
    assert (parts.about, len(parts.train["bank"])) == ({}, 6)
    without = prepare(own(BANK + SPOKEN, curriculum={"family_shares": {"bank": {}}}))
    assert [stage.family_shares for stage in without.stages] == [{}]
    assert isinstance(without.train["bank"], list)
    found = play_baselines({"bank": domain}, {"bank": parts.held_out["bank"]})
    assert found == {"bank": {"nothing": 0.0, "pay": pytest.approx(1 / 3)}}


WHOLE = """

from dataclasses import replace

from pipeline.environments import Domain


def few_tasks(seed, n, split, difficulty):
    tasks = [replace(t, domain="whole", family=["big", "small"][i >= 3])
             for i, t in enumerate(generate_tasks(seed, 5, split, difficulty))]
    return tasks[:n]


def whole(tasks):
    return Domain(name="whole", environment=BankEnvironment, generate_tasks=globals()[tasks],
                  expert=expert, family_shares={"small": 0.75})
"""


def with_a_whole_domain(own, **sections):
    config = own(BANK + WHOLE, **sections)
    factory = {"factory": "own_bank:whole", "arguments": {"tasks": "few_tasks"}}
    data = {**config.data.model_dump(), "environments": {"bank": factory}}
    return config.model_copy(update={"data": DataSettings(**data)})


def test_a_function_may_return_a_whole_domain(own):
    parts = prepare(with_a_whole_domain(own))
    assert {task.domain for tasks in (parts.train, parts.held_out) for task in tasks["bank"]} == {
        "bank"
    }
    assert parts.stages[0].family_shares == {"bank": {"small": 0.75, "big": 0.25}}
    assert parts.notes[0] == "bank: 5 tasks are all there are (tasks_per_domain 6)"


def test_demonstrations_have_the_shares_of_families_and_repeat_no_flaws(own):
    """Of 16 demonstrations, 12 come from the two small tasks, each with other random decisions."""
    config = with_a_whole_domain(own, warm_start={"rule_share": 0.5})
    (bank,) = load_domains(config).values()
    made = list(demonstrations_of(config, bank, 16))
    accounts = [one.messages[3]["content"] for one in made]
    assert {account: accounts.count(account) for account in sorted(set(accounts))} == {
        "K00": 2,
        "K01": 1,
        "K02": 1,
        "K03": 6,
        "K04": 6,
    }
    ends = [one.messages[-2]["content"] for one in made if one.messages[3]["content"] == "K03"]
    assert {"frozen", '{"error": "no such account"}'} == set(ends)
    assert [one.messages for one in demonstrations_of(config, bank, 16)] == [
        m.messages for m in made
    ]


def test_shares_of_a_module_for_families_without_tasks_are_a_note(own):
    notes = prepare(own(f"{BANK}\n\nFAMILY_SHARES = {{'big': 0.5}}\n")).notes
    assert "no task has the family big, so all count alike" in notes[0]
    settings = {"family_shares": {"bank": {"big": 0.5}}}
    says(refusal(prepare, own(curriculum=settings)), "bank: got 'big', which has no tasks")


# Resolved alike


def test_slots_with_all_that_an_episode_sets_are_fine(own):
    names = "('account', 'user', 'frozen', 'final_message', 'stop_reason')"
    prepare(own(BANK.replace(CLASS, f"{CLASS}\n    __slots__ = {names}"), "slotted_bank"))


# What one's own domain gets


def test_words_may_be_a_function(own):
    code = BANK.replace("WORDS = (", "WORDS = lambda: (")
    (bank,) = load_domains(own(code, "lazy_bank")).values()
    assert "Which account?" in bank.words()


def test_a_domain_of_ones_own_has_task_files_and_datasets(own, tmp_path):
    tasks = generated(own(), load_domains(own())["bank"], 4, "train")
    save_tasks(tasks, path := tmp_path / "bank.jsonl")
    rows = [{**task.row(), "family": task.family, "branch": task.branch} for task in tasks]
    Dataset.from_list(rows).save_to_disk(tmp_path / "folder")
    for source in (path, tmp_path / "folder"):
        parts = prepare(own(tasks={"bank": str(source)}))
        assert list(parts.train["bank"]) == tasks
        assert [task.id for task in parts.held_out["bank"]] == ["test-0", "test-1", "test-2"]


def test_the_demonstrations_are_what_a_rollout_would_hold(own):
    """With what `reset` adds to the request, and a tool's words that are no JSON."""
    (bank,) = load_domains(own()).values()
    task = generated(own(), bank, 2, "train")[1]
    messages, reward = run_expert(bank.make(), bank.expert, task)
    assert reward == 1.0
    said = [(message["role"], message["content"]) for message in messages]
    assert said == [
        ("system", "bank"),
        ("user", "freeze it now"),
        ("assistant", "Which account?"),
        ("user", "K01"),
        ("assistant", ""),
        ("tool", '{"status": "open"}'),
        ("assistant", ""),
        ("tool", "frozen"),
        ("assistant", "Done."),
    ]
    assert task.prompt[-1]["content"] == "freeze it"
    wrong = [run_expert(bank.make(), bank.expert, task, 0.0, seed)[1] for seed in range(20)]
    assert 0.0 in wrong


def test_own_words_are_tokens_of_the_tiny_model(own):
    parts = prepare(own())
    ids = parts.tokenizer("Which account?", add_special_tokens=False)["input_ids"]
    assert len(ids) == 1
    assert len(parts.tokenizer) == len(tokenizer()) + 3  # "bank" and "frozen" are words of others


def test_words_come_from_the_demonstrations_of_a_module_without_words(own, tmp_path):
    """A call's syntax and a sentence are one token each; the digits of an own id stay apart."""
    parts = prepare(own(BANK.replace("WORDS =", "_words ="), "wordless_bank", warm_start=LONGER))
    (bank,) = parts.domains.values()
    (made, *_) = demonstrations_of(own(name="wordless_bank"), bank, 1)
    ids = encode(parts.chat, made.messages, made.tools)["input_ids"]
    pieces = [parts.tokenizer.decode([token]) for token in ids]
    assert pieces[:6] == ["<|im_start|>", "system\n", "bank", "\ntools:", " freeze", " show"]
    call = ["<tool_call>", '\n{"name": "', "freeze", '", "arguments": {"account": "', "K00"]
    assert "|".join([*call, '"}}\n']) in "|".join(pieces)
    assert {"freeze", " it now", "Which account?", "Done."} <= {*pieces}
    file = tmp_path / "bank.jsonl"
    talk = json.dumps({"messages": made.messages}).replace("K00", "acc-17")
    file.write_text((talk + "\n") * 3)
    from_file = own(BANK.replace("WORDS =", "_words ="), "filed_bank", warm_start=LONGER)
    data = from_file.data.model_copy(update={"demonstrations": {"bank": str(file)}})
    read = prepare(from_file.model_copy(update={"data": data})).tokenizer
    spelled = list(map(read.decode, read.encode("Which account?acc-17", add_special_tokens=False)))
    assert spelled == ["Which account?", "acc", "-", "1", "7"]
    assert len(parts.tokenizer.encode("acc", add_special_tokens=False)) == 3


def test_the_id_of_a_session_is_no_part_of_a_task(own):
    """But another random number is."""

    def keep(text: str) -> str:
        return BANK.replace(
            '        return " now"', f'        self.kept = {text}\n        return " now"'
        )

    uuids = '__import__("uuid").uuid4().hex, f"http://bank/{__import__(\'uuid\').uuid4()}"'
    prepare(own(keep(uuids), "session_bank"))
    said = refusal(prepare, own(keep('__import__("os").urandom(4).hex()'), "random_bank"))
    assert "reset starts another episode each time" in said
    assert "self.kept" in said


def test_a_resumed_run_keeps_the_words_of_its_checkpoint(own, tmp_path):
    """Also if the demonstrations are gone."""
    code = BANK.replace("WORDS =", "_words =")
    config = own(code, "kept_bank", warm_start=LONGER, run={"output_dir": str(tmp_path / "out")})
    made = prepare(config).tokenizer
    folder = tmp_path / "out" / "checkpoints" / "warm-start"
    made.save_pretrained(folder)
    tiny_model(made, 0).config.save_pretrained(folder)
    write_manifest(folder, 1)
    now = {"resume_from_checkpoint": "latest", "output_dir": tmp_path / "out"}
    changed = code.replace("Which account?", "Whose account?").replace('"Done."', '"Bye."')
    resumed = own(changed, "changed_bank", warm_start=LONGER, run=now)
    assert prepare(resumed).tokenizer.get_vocab() == made.get_vocab()


# What is refused

LONGER = {"steps": 40}  # enough demonstrations that an id comes twice
NO_EXPERT = BANK[: BANK.index("def expert")] + BANK[BANK.index("def generate_tasks") :]
ENDLESS = (
    BANK
    + """
import itertools
class EndlessList(list):
    def __iter__(self): return itertools.count()
class EndlessDict(dict):
    def items(self): return ((str(n), 0) for n in itertools.count())
"""
)
MODULES = [
    ("fails on import", "1 / 0" + BANK, "which fails on import (ZeroDivisionError: division"),
    ("exits on import", "raise SystemExit(3)" + BANK, "which fails on import (SystemExit: 3"),
    (
        "imports what is not there",
        "import nowhere" + BANK,
        "(No module named 'nowhere' (bank_that_imports_what_is_not_there.py, line 1: import",
    ),
    ("has no class", BANK.replace("BankEnv", "Env"), "has no attribute 'BankEnvironment'); give"),
    ("holds no class", BANK + "\nBankEnvironment = 3", "which is 3; name a class"),
    ("has no reset", BANK.replace("def reset", "def start"), "which has no reset(); add it"),
    ("has no reward", BANK.replace("def get_reward", "def rate"), "which has no get_reward(); add"),
    (
        "has a bare tool",
        BANK.replace("account: str) -> str:", "account):"),
        "whose tools cannot be ",
    ),
    ("has odd words", BANK + "\nWORDS = 'bank'", "whose WORDS are 'bank'; give a list of texts"),
    ("has empty words", BANK + "\nWORDS = ['']", "whose WORDS are ['']; give a list of texts"),
    ("has failing words", BANK + "\nWORDS = 3", "whose WORDS fail (TypeError: 'int' object is not"),
    (
        "has words without end",
        ENDLESS + "WORDS = map(str, itertools.count())",
        "whose WORDS fail (ValueError: gives more than 100000 values); give a list of texts",
    ),
    (
        "has shares without end",
        ENDLESS + "FAMILY_SHARES = EndlessDict()",
        "whose FAMILY_SHARES fail (ValueError: gives more than 100000 values); give {family",
    ),
    (
        "has tools without end",
        ENDLESS + "BankEnvironment.schemas, BankEnvironment.call = EndlessList(), print",
        "whose tools cannot be told to a model (ValueError: gives more than 100000 values); mend",
    ),
    ("has an odd limit", BANK + "\nMAX_TASKS = 'a'", "whose MAX_TASKS is 'a'; give a whole number"),
]
CLASS = "class BankEnvironment:"
DATACLASS = "@__import__('dataclasses').dataclass"
HALF = "'\\ud800'"  # half of a surrogate pair, as a module writes it
MODULES += [
    (
        "has slots",
        BANK.replace(CLASS, f"{CLASS}\n    __slots__ = ('account', 'user', 'frozen')"),
        "whose __slots__ lack final_message, stop_reason, which an episode sets; add them, or ",
    ),
    (
        "is a dataclass with slots",
        BANK.replace(CLASS, f"{DATACLASS}(slots=True)\n{CLASS}\n    final_message: str = ''"),
        "whose __slots__ lack stop_reason, which an episode sets; add them, or take the slots out",
    ),
    (
        "is frozen",
        BANK.replace(CLASS, f"{DATACLASS}(frozen=True)\n{CLASS}"),
        "which is a frozen dataclass, but an episode changes it; take out frozen=True",
    ),
    (
        "is a named tuple",
        BANK.replace(
            CLASS, "class BankEnvironment(__import__('typing').NamedTuple):\n    account: str = ''"
        ),
        "which is a NamedTuple, but an episode changes it; write a class",
    ),
    (
        "computes its stop reason",
        BANK.replace(CLASS, f"{CLASS}\n    stop_reason = property(lambda self: 'a')"),
        "whose stop_reason is a property, but an episode sets it; give it a setter, or another",
    ),
    (
        "has half a letter in its words",
        BANK + f"\nWORDS = ['a', {HALF}]",
        "whose WORDS have '\\ud800', half of a surrogate pair; mend it",
    ),
    (
        "has half a letter in a docstring",
        BANK.replace("Show an account.", "Show \\ud800."),
        "(TypeError: show (bank_that_has_half_a_letter_in_a_docstring.py, line 26): its docstring",
    ),
]
COUNTED = BANK.replace('id=f"', 'id=f"{next(count)}-')
COUNTED += "import itertools\ncount = itertools.count()\n"
GENERATORS = [
    (
        "gives other tasks each time",
        COUNTED,
        "gives other tasks when it is called again, so no run could be resumed; draw from its arg",
    ),
    *(
        (
            f"has tasks with half a letter in {what}",
            BANK.replace(before, after),
            "gave the task '",
        )
        for what, before, after in (
            ("a prompt", '"content": "freeze it"', f'"content": {HALF}'),
            ("an id", 'id=f"', f'id={HALF} + f"'),
            ("a family", "prompt=prompt,", f"prompt=prompt, family={HALF},"),
        )
    ),
    (
        "has tasks without messages",
        BANK.replace("prompt=prompt,", "prompt='freeze it',"),
        "gave the task 'validation-0' (ValueError: prompt: bad message 'f'; give role and content",
    ),
    (
        "has tasks with numbers for ids",
        BANK.replace('id=f"{split}-{i}"', "id=i"),
        "gave the task 0 (ValueError: id: got 0; give a non-empty string); mend it",
    ),
    *(
        (
            f"has an expert that writes half a letter {where}",
            BANK.replace(before, after),
            "the expert does not solve task 'train-0' (ValueError: it wrote what JSON cannot hold",
        )
        for where, before, after in (
            ("to the user", 'agent.ask("Which account?")', f'agent.ask("Which?" + {HALF})'),
            ("at the end", 'return "Done."', f"return {HALF}"),
            ("in a call", "account=account)", f"account=account + {HALF})"),
        )
    ),
    (
        "has baselines with half a letter",
        BANK + f"\ndef baselines(task): return {{{HALF}: [('show', {{'account': 'K1'}})]}}\n",
        "baselines of bank fail on task 'test-0' (ValueError: they hold what JSON cannot",
    ),
    ("has no generator", BANK.replace("def generate_tasks", "def make"), "has no generate_tasks("),
    (
        "fails to generate",
        BANK + "\ndef generate_tasks(*_): return {}[0]",
        "generate_tasks(0, 20, 'validation', 'medium') fails (KeyError: 0 "
        "(bank_that_fails_to_generate.py, line ",
    ),
    (
        "generates nothing",
        BANK + "\ndef generate_tasks(*_): return []",
        "gave []; return a list of Task",
    ),
    (
        "generates without end",
        ENDLESS + "def generate_tasks(*_): return itertools.count()",
        "gave count(0); return a list of Task",
    ),
    (
        "generates a list without end",
        ENDLESS + "def generate_tasks(*_): return EndlessList()",
        "gave []; return a list of Task",
    ),
    (
        "has facts without end",
        ENDLESS + "def about(): return EndlessDict()",
        "whose about() fails (ValueError: gives more than 100000 values); return JSON values",
    ),
    (
        "has policies without end",
        ENDLESS + "def baselines(task): return {'all': itertools.count()}",
        "baselines of bank fail on task 'test-0' (ValueError: gives more than 100000 values)",
    ),
    (
        "generates for another domain",
        BANK.replace('domain="bank"', 'domain="desk"'),
        "gave one of the domain 'desk'; return tasks of bank",
    ),
    (
        "refuses to generate",
        BANK + "\ndef generate_tasks(*_): raise ValueError('no\\nmore')",
        "tasks of bank: no more",
    ),
    (
        "has a lazy expert",
        BANK.replace('agent.call("freeze"', 'str("freeze"').replace(", account=agent", ", agent"),
        "the expert does not solve task 'train-0' (",
    ),
    (
        "has a tool that fails",
        BANK.replace("self.frozen.append(account)", "raise KeyError('drawer')"),
        "(reward 0; freeze raised KeyError: 'drawer' (bank_that_has_a_tool_that_fails.py, line ",
    ),
    (
        "has an expert that says the wrong thing",
        BANK.replace('return "Done."', 'return "Bye."'),
        "the expert does not solve task 'train-0' (reward 0); mend the expert or the task",
    ),
    (
        "has an expert that fails",
        BANK.replace("account = agent.ask", "agent.ask('Hm.'); account = agent.ask"),
        "the expert does not solve task 'train-0' (ValueError: nobody answers 'Hm.' "
        "(bank_that_has_an_expert_that_fails.py, line ",
    ),
    (
        "has tasks without a goal",
        BANK.replace('"goal": {"account"', '"aim": {"account"').replace('["goal"]', '["aim"]'),
        "the expert does not solve task 'train-0' (ValueError: its payload has no goal); mend",
    ),
    (
        "has an odd expert",
        BANK + "\nexpert = 'me'",
        "the expert does not solve task 'train-0' (TypeError: 'str' object is not callable); mend",
    ),
    ("has no expert", NO_EXPERT, "demonstrations: none of bank, which has no file and no expert: "),
    (
        "fails in reset",
        BANK.replace("def reset(self, **row)", "def reset(self)"),
        "bank: reset failed on task 'train-0': NameError: name 'row' is not defined (bank_that_",
    ),
    (
        "cannot score an episode without calls",
        NO_EXPERT.replace("return float(", "return [][0] + float("),
        "bank: get_reward failed on task 'train-0': IndexError: list index out of range (",
    ),
    (
        "makes too few tasks",
        BANK + "\nMAX_TASKS = 11",
        "warm_start: got 3 steps of 4 demonstrations, but the experts give at most 11 a domain; ",
    ),
]


@pytest.mark.parametrize("case", [pytest.param(row, id=row[0]) for row in [*MODULES, *GENERATORS]])
def test_a_module_that_cannot_serve_is_refused_in_one_line(case, own):
    """Each module has a name of its own: a module is imported once a process."""
    name = "bank_that_" + case[0].replace(" ", "_")
    said = refusal(prepare, own(case[1], name))
    assert case[2] in said
    if case in MODULES:
        assert said.startswith(f"environments: bank: got '{name}:BankEnvironment'")


def test_modules_are_found_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    others = str(tmp_path.parent)  # folders of earlier tests, which would make the line too long
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.startswith(others)])
    (tmp_path / "bank_of_here.py").write_text(BANK)
    data = {"domains": ["bank"], "environments": {"bank": "bank_of_here:BankEnvironment"}}
    assert load_domains(Config(data=data))["bank"].expert is not None
    data["environments"] = {"bank": "bank_of_nowhere:BankEnvironment"}
    said = refusal(load_domains, Config(data=data))
    assert "(No module named 'bank_of_nowhere' in " in said and f"{tmp_path} or the ins" in said


def test_an_expert_that_fails_in_the_warm_start_is_one_line(own):
    """On a task that was not tried before."""
    code = BANK.replace('return "Done."', 'return "Done." if goal["account"] != "K09" else 1 / 0')
    config = own(code, "late_bank")
    parts = prepare(config)
    said = refusal(sft_examples, config, parts.chat, parts.demonstrations)
    says(said, "tasks of bank", "'train-9'", "ZeroDivisionError", "mend")


def test_a_file_whose_task_the_own_expert_cannot_solve_is_refused(own, tmp_path):
    row = {"id": "b", "prompt": [{"role": "user", "content": "freeze"}]}
    path = tmp_path / "bank.jsonl"
    path.write_text(json.dumps({**row, "payload": {"goal": {"account": ["K1"]}}}))
    said = refusal(prepare, own(tasks={"bank": str(path)}))
    assert said.startswith(f"{path}: task 'b': the actions that serve its goal do not lead to ")


def test_a_success_is_what_the_threshold_says(own):
    code = BANK.replace("return float(self.frozen", "return 0.5 * float(self.frozen")
    evaluation = {"success_threshold": 0.5}
    assert prepare(own(code, "half_bank", evaluation=evaluation)).domains["bank"].expert
    assert "(reward 0.5); mend the expert or the task" in refusal(prepare, own(code, "half_bank"))
