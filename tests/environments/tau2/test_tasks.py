"""Tasks: splits without common combinations of faults, shares, tickets, difficulties."""

import pytest

from pipeline.config.settings import Config
from pipeline.environments.domains import generated, load_domains
from pipeline.environments.tau2.domain import NOTHING, faults_of, tau2_domain
from pipeline.preflight.parts import prepare
from pipeline.report.tables import about_table
from scripts.proofs.tau2_cases import DOMAINS
from tests.environments.tau2.conftest import SOURCE
from tests.support.messages import refusal, says

LIMITS = {"max_tokens": 4096, "tasks_per_step": 2}
FEW = {"tasks_per_domain": 4, "eval_tasks_per_domain": 2}
ALL = 5000  # more tasks than any split has
TELECOM = pytest.mark.parametrize("domain", ["telecom"], indirect=True)


def ids_of(domain, split):
    return [task.id for task in domain.generate_tasks(0, ALL, split, "medium")]


def test_no_task_is_in_two_splits(domain):
    train, validation, test = (ids_of(domain, s) for s in ("train", "validation", "test"))
    assert len({*train, *validation, *test}) == len(train) + len(validation) + len(test)
    assert sorted(test) == sorted(domain.environment.world.checkout.splits["test"])
    assert train and validation
    assert ids_of(domain, "base") == domain.environment.world.checkout.splits["base"]
    assert ids_of(domain, "train") == train


@TELECOM
def test_no_combination_of_faults_of_a_test_task_is_trained_on(domain):
    tested = [{*faults_of(task_id)} for task_id in ids_of(domain, "test")]
    for split in ("train", "validation"):
        assert all({*faults_of(task_id)} not in tested for task_id in ids_of(domain, split))


@TELECOM
def test_difficulty_counts_faults(domain):
    easy, hard = ([*domain.generate_tasks(0, ALL, "train", d)] for d in ("easy", "hard"))
    assert all(len(faults_of(task.id)) <= 3 for task in easy)
    assert all(len(faults_of(task.id)) > 3 for task in hard)
    assert len(easy) + len(hard) == len(ids_of(domain, "train"))


def test_only_telecom_has_difficulties(checkout_path):
    config = Config(data={"tau2": checkout_path, "domains": ["airline"], "difficulty": "hard"})
    says(
        refusal(generated, config, load_domains(config)["airline"], 4, "train"),
        "difficulty: got hard, but only telecom has levels",
    )


def test_what_doing_nothing_solves_is_rare_in_training_and_all_there_in_evaluation(domain):
    train, test = (domain.generate_tasks(0, ALL, s, "medium") for s in ("train", "test"))
    share = sum(task.family == NOTHING for task in train) / len(train)
    assert domain.family_shares.get(NOTHING, share) <= 0.2
    for task in (*train, *test):
        episode = domain.make()
        episode.reset(**task.row())
        episode.stop_reason, episode.messages = "completed", []
        assert (episode.get_reward() == 1) == (task.family == NOTHING)
    assert {task.id for task in test} == {*domain.environment.world.checkout.splits["test"]}


def test_results_name_the_tasks_whose_gold_calls_fail_and_those_that_doing_nothing_solves(
    checkout_path,
):
    facts = {name: tau2_domain(str(checkout_path), name).about() for name in DOMAINS}
    failing = {name: of.get("gold_calls_fail", {}) for name, of in facts.items()}
    solved = {name: of.get("solved_by_nothing", {}) for name, of in facts.items()}
    counts = {name: sum(map(len, of.values())) for name, of in failing.items()}
    text = about_table({"about": facts})
    if SOURCE == "miniature":
        assert failing["retail"] == {"validation": ["1"]} and not failing["airline"]
        assert failing["telecom"] == {
            "test": ["[service_issue]airplane_mode_on|lock_sim_card_pin[PERSONA:None]"]
        }
        assert solved["airline"] == {"train": ["0"], "test": ["2"]}
        assert solved["retail"] == {"test": ["2"]} and not solved["telecom"]
        assert ["airline", "solved by nothing", "train: 0; test: 2"] in text
    else:
        assert counts["retail"] == 15
        assert sum(map(len, solved["retail"].values())) == 7  # 6.1 % of 114
        assert sum(map(len, solved["airline"].values())) == 23  # 46 % of 50
    assert ["retail", "gold calls fail"] in [row[:2] for row in text]


def test_telecom_has_its_kinds_evenly(checkout_path):
    telecom = tau2_domain(str(checkout_path), "telecom")
    kinds = {task.family for task in telecom.generate_tasks(0, ALL, "train", "medium")}
    assert telecom.family_shares == dict.fromkeys(kinds, 1 / len(kinds))
    first = [task.family for task in telecom.generate_tasks(0, len(kinds), "train", "medium")]
    assert {*first} == kinds


@pytest.mark.skipif(SOURCE == "miniature", reason="the miniature's tickets consent to nothing")
def test_a_ticket_has_the_consent_that_its_scenario_has(checkout_path):
    def tickets(**options):
        domain = tau2_domain(str(checkout_path), "telecom", **options)
        return [t.prompt[1]["content"] for t in domain.generate_tasks(0, ALL, "test", "medium")]

    agreed, bare = tickets(), tickets(refuel_consent=False)
    assert (sum("refuel" in t for t in agreed), sum("refuel" in t for t in bare)) == (25, 9)
    assert all(ticket.startswith(without) for ticket, without in zip(agreed, bare, strict=True))


@pytest.mark.skipif(SOURCE == "miniature", reason="the miniature has none of the phone's checks")
def test_the_expert_solves_every_task_and_flawed_demonstrations_do_not(checkout_path):
    telecom = tau2_domain(str(checkout_path), "telecom")
    for split, number in (("train", 400), ("validation", ALL), ("test", ALL)):
        tasks = telecom.generate_tasks(0, number, split, "medium")
        assert all(telecom.demonstrate(task, 10)[1] == 1 for task in tasks)
    flawed = [telecom.demonstrate(task, 10, rule_share=0.6)[1] for task in tasks]
    assert 0.2 < sum(flawed) / len(flawed) < 0.6


def test_a_domain_of_the_benchmark_has_any_name_beside_an_embedded_one(checkout_path):
    factory = {
        "factory": "pipeline.environments.tau2.domain:tau2_domain",
        "arguments": {"path": str(checkout_path), "domain": "telecom"},
    }
    data = {"domains": ["telecom", "real"], "environments": {"real": factory}, **FEW}
    config = Config.model_validate({"data": data, "warm_start": {"steps": 0}, "rollout": LIMITS})
    parts = prepare(config)
    assert {task.domain for task in parts.train["real"]} == {"real"}
    assert parts.domains["telecom"].about is None
    assert parts.about["real"]["benchmark"] == "τ²-bench telecom"
