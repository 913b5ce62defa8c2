"""Environments of libraries by name: `library:name`, `--env`, libraries of packages, bad forms."""

import pytest

from pipeline.config.cli import parse
from pipeline.config.domain_names import LIBRARIES, domains_of_user, library_of
from pipeline.environments.domains import load_domains
from tests.support.messages import refusal, says

LIBRARY = """
from pipeline.common.console import installed
from pipeline.common.errors import UserError
from pipeline.data.tasks import Task
from pipeline.environments.domains import Domain


def zoo(name: str, size: int = 3) -> Domain:
    class Animal:
        def reset(self, id):
            return f"say {name}"

        def get_reward(self):
            return 1.0

    def generate_tasks(seed, n, split, difficulty):
        prompt = ({"role": "user", "content": "go"},)
        return [Task(domain="", id=str(k), prompt=prompt, payload="{}") for k in range(size)]

    if name == "unicorn":
        raise UserError("there is no unicorn; did you mean horse?")
    if name == "dodo":
        installed("dodo", "pip install dodo")
    if name == "bug":
        raise KeyError("leg")
    return Domain(name="", environment=Animal, generate_tasks=generate_tasks)
"""


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """A package that brings the library `zoo`, as pip would install it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "zoo_library.py").write_text(LIBRARY)
    for name in ("zoo_library", "other_library"):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        points = f"twice = {name}:zoo\n" + "zoo = zoo_library:zoo\n" * (name == "zoo_library")
        (folder / "entry_points.txt").write_text(f"[three_domain_grpo.libraries]\n{points}")


def domains(*argv):
    return load_domains(parse([*argv]))


def test_the_prefix_names_the_library_and_the_rest_the_environment(zoo):
    animals = "{pet: 'zoo:cow', wild: {factory: 'zoo:lion', arguments: {size: 2}}}"
    found = domains("--domains", "pet,wild", "--environments", animals)
    assert {n: d.environment().reset("0") for n, d in found.items()} == {
        "pet": "say cow",
        "wild": "say lion",
    }
    made = {n: d.generate_tasks(0, 9, "train", "medium") for n, d in found.items()}
    assert {n: [t.key for t in tasks] for n, tasks in made.items()} == {
        "pet": [("pet", "0"), ("pet", "1"), ("pet", "2")],
        "wild": [("wild", "0"), ("wild", "1")],
    }


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ("zoo:cow", "cow"),
        ("zoo:farm/cow", "cow"),
        ("zoo:http://HOST:8000", "zoo"),
        ("zoo:python cow.py", "zoo"),
        ("my_pkg.bank:BankEnvironment", "BankEnvironment"),
    ],
)
def test_env_is_short_for_one_domain_with_its_environment(zoo, environment, name):
    data = parse(["--env", environment]).data
    assert (data.domains, data.environments) == ([name], {name: environment})


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            ["--env", "zoo:unicorn"],
            ("zoo:unicorn", "there is no unicorn; did you mean horse?"),
        ),
        (["--env", "zoo:dodo"], ("dodo is not installed; pip install dodo",)),
        (["--env", "zoo:bug"], ("zoo:bug", "KeyError", "leg", "zoo_library.py, line 25")),
        (["--env", "zoo:"], ("name an environment after the colon",)),
        (["--env", "zoo"], ("got zoo: 'zoo'", "module:Class", *LIBRARIES)),
        (["--env", "twice:cow"], ("claimed by other_library and zoo_library", "uninstall one")),
        (["--env", "reasonin_gym:sums"], ("did you mean reasoning_gym:sums?",)),
        (["--env", "zoo:cow", "--env", "zoo:lion"], ("--env: got zoo:cow beside --env zoo:lion",)),
        (["--env", "zoo:cow", "--domains", "airline"], ("beside --domains", "--environments")),
        (["--env", "zoo:cow", "--environments", "{a: b:C}"], ("beside --environments",)),
    ],
)
def test_a_wrong_name_is_one_line_with_a_remedy(zoo, argv, parts):
    says(refusal(domains, *argv), *parts)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("{siz: 3}", ("argument siz", "got 3", "it takes size")),
        ("{size: few}", ("argument size", "valid integer", "got 'few'")),
    ],
)
def test_a_wrong_argument_is_told_with_those_that_exist(zoo, arguments, parts):
    environments = f"{{pet: {{factory: 'zoo:cow', arguments: {arguments}}}}}"
    says(refusal(domains, "--domains", "pet", "--environments", environments), *parts)


TOOLS = ("--domains", "desk", "--tasks", "{desk: rows.jsonl}", "--reward-funcs", "my:f")


def test_tools_are_an_environment_of_a_domain_of_tasks():
    config = parse([*TOOLS, "--tools", "{desk: mcp:python server.py}"])
    assert config.data.tools == {"desk": "mcp:python server.py"}
    assert {n: f.factory for n, f in domains_of_user(config.data).items()} == config.data.tools
    assert library_of(config.data.tools["desk"]) == (LIBRARIES["mcp"], "python server.py")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([*TOOLS, "--tools", "{desk: my_tools}"], ("got desk: 'my_tools'", "mcp:COMMAND")),
        ([*TOOLS, "--tools", "{bank: 'mcp:x'}"], ("got bank, which has no tasks",)),
        ([*TOOLS[:4], "--tools", "{desk: 'mcp:x'}"], ("nothing scores; give reward_funcs",)),
        (
            [*TOOLS, "--tools", "{desk: 'mcp:x'}", "--environments", "{desk: my:E}"],
            ("got desk, whose environment has its own; take one of the two out",),
        ),
        (
            ["--tasks", "{airline: x}", "--tools", "{airline: 'mcp:x'}", *TOOLS[4:]],
            ("got airline, whose environment has its own",),
        ),
        (
            ["--domains", "airline", *TOOLS[2:], "--tools", "{desk: 'mcp:x'}"],
            ("got 'desk'; name domains of the run", "(airline)"),
        ),
    ],
)
def test_tools_of_no_domain_and_two_environments_of_one_are_refused(argv, parts):
    says(refusal(parse, argv), *parts)
