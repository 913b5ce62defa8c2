"""What is checked before any rank computes: `--check`, preparation, memory, the run's folder."""

import re
import shutil

import pytest

from pipeline.checkpoints.checkpoint import TrainState, save
from pipeline.checkpoints.run_folder import begin_folder, check_folder, open_folder
from pipeline.config.recipe import load_recipe
from pipeline.config.settings import Config, ModelSettings
from pipeline.models import lora
from pipeline.models.memory import GIB, Memory
from pipeline.models.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from pipeline.preflight import check
from pipeline.preflight.check import check_and_prepare
from pipeline.preflight.parts import FOR_PRETRAINED, prepare
from tests.support import ROOT
from tests.support.helpers import ALONE, tokenizer
from tests.support.messages import refusal, says

pytestmark = pytest.mark.whole_run

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
QWEN = "qwen3_4b_8gpu"
# Recipes with `tau2` need a checkout: tests/end_to_end/test_tau2.py runs them. `mixed` is checked
# by test_installed.py, `pretrained` is played by test_models_of_others.py.
OF_OTHER_TESTS = {"three_domain_tiny", "evaluate_only", QWEN, "mixed", "pretrained"}
OF_OTHER_TESTS |= {"qwen3_0.6b_1gpu", "qwen3_8b_lora_8gpu", "qwen3_4b_vllm_8gpu"}
OF_OTHER_TESTS |= {"qwen3_8b_full_8gpu", "qwen3_32b_lora_8gpu"}
OF_OTHER_TESTS |= {"tau2_telecom_tiny", "tau2_three_smoke", "qwen3_4b_tau2_8gpu"}


@pytest.fixture(autouse=True)
def on_cpu_without_network(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for module in ("models.loading", "data.datasets"):
        monkeypatch.setattr(f"pipeline.{module}.hub_reachable", lambda: False)


def config(**sections) -> Config:
    """The defaults with few tasks, and what is given."""
    few = {"tasks_per_domain": 30, "eval_tasks_per_domain": 6}
    return Config.model_validate({**sections, "data": {**few, **sections.get("data", {})}})


# What --check prints


def test_check_prints_what_the_tiny_recipe_would_do(capsys):
    assert check.main(load_recipe("three_domain_tiny")) == 0
    said = capsys.readouterr().out
    assert said.startswith("recipe three_domain_tiny: model tiny\n")
    shares = "share of move 0.50; share of cancel 0.25; share of bags 0.25"
    says(
        said,
        f"  airline: 800 to train (bags 266, cancel 267, move 267; {shares}), 120 test\n",
        "stages (sequential; groups of 8 episodes)\n",
    )
    assert re.search(r"  retail: \d+ steps of 7 airline \+ 2 telecom \+ 15 retail groups\n", said)
    assert "prompts (limits: 256 tokens an episode, 40 a turn)\n" in said
    for domain in ("airline", "retail", "telecom"):
        assert re.search(rf"  {domain}: longest prompt \d\d tokens\n", said)
        assert (
            f"--- a prompt of {domain} (train-medium-0-00000) ---\n<|im_start|>system\n{domain}\n"
            in said
        )
    assert "memory per rank, estimated, in GiB\n" in said
    for part in ("weights (fp32)", "key-value cache", "moments of AdamW", "logits", "sum"):
        assert re.search(rf"  {re.escape(part)}.* +\d+\.\d\d\n", said)
    assert re.search(r"  of \d+\.\d GiB that a rank has here: fits\n", said)
    assert re.search(
        r"  so much fits: max_tokens [\d,]+ with 512 episodes at once, or 720 of 720", said
    )


@pytest.mark.parametrize(
    "path",
    [path for path in RECIPES if path.stem not in OF_OTHER_TESTS],
    ids=lambda path: path.stem,
)
def test_every_other_shipped_recipe_passes_the_check(path, capsys):
    assert check.main(load_recipe(path).changed("data", tasks_per_domain=60)) == 0
    assert "that a rank has here" in capsys.readouterr().out


def test_an_environment_that_the_run_does_not_serve_is_told(capsys):
    data = {"environments": {"bank": "my_pkg.bank:Bank"}, "domains": ["airline", "retail"]}
    check_and_prepare(config(data=data), ALONE)
    assert capsys.readouterr().out == (
        "warning: environments: bank is not used; add bank to domains airline,retail\n"
    )


def test_an_evaluation_has_no_stages_and_a_check_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    evaluation = load_recipe("evaluate_only").changed("run", output_dir=tmp_path / "out")
    assert check.main(evaluation) == 0
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().out
    says(said, "that a rank has here", "  none: evaluation only\n")
    assert "AdamW" not in said


def test_a_shipped_recipe_for_a_hub_model_is_checked_without_the_hub(capsys):
    assert check.main(load_recipe(QWEN).changed("data", tasks_per_domain=60)) == 0
    said = capsys.readouterr().out
    assert "  of 74.5 GiB that a rank has on a GPU of another machine: fits\n" in said
    assert said.startswith("recipe qwen3_4b_8gpu: model Qwen/Qwen3-4B\n")
    assert re.search(r"  weights \(bf16\) +7\.49\n", said)
    assert "sampling copy" not in said
    assert re.search(r"  moments of AdamW +0\.25\n", said)
    assert re.search(r"  key-value cache +36\.00\n", said)
    assert re.search(r"  sum, with the larger of the last two +46\.61\n", said)
    bounds = "max_tokens 14,540 with 32 episodes at once, or 48 of 90 episodes at once with"
    assert f"  so much fits: {bounds} max_tokens 8,192\n" in said


@pytest.mark.parametrize("num_gpus", [1_000_000, 4_000_000])
def test_a_run_that_would_be_refused_is_refused_by_the_check(num_gpus, capsys):
    message = refusal(check.main, config(run={"num_gpus": num_gpus}))
    says(message, "memory: each rank needs 0.", "has 0.0", "or fewer ranks")
    assert "does not fit: a run would be refused\n" in capsys.readouterr().out


def test_a_check_refuses_ranks_for_which_too_little_memory_is_free(monkeypatch):
    monkeypatch.setattr(check, "main_memory", lambda: (24 * GIB, GIB))
    message = refusal(check.main, config(run={"num_gpus": 2}))
    says(message, "--num-gpus: got 2 ranks on CPU", "1.2 GiB", "1.0 GiB are", "--num-gpus 1")


def test_limits_that_are_too_low_for_a_real_model_name_recipes_for_one():
    few = {"rollout": {"max_tokens": 20}, "warm_start": {"steps": 0}}
    real, tiny = (
        refusal(prepare, config(**few, model={"model": model}), with_tiny_tokenizer=True)
        for model in ("Qwen/Qwen3-4B", "tiny")
    )
    assert real == f"{tiny}, or take a recipe that fits: {FOR_PRETRAINED}"
    for name in re.findall(r"smollm2_\w+", FOR_PRETRAINED):
        assert load_recipe(name).recipe == name


def test_an_unknown_hub_model_is_refused():
    message = refusal(check.main, config(model={"model": "nobody/nothing"}))
    says(message, "model: ", "'nobody/nothing'", "configuration cannot be loaded")


# Memory


@pytest.mark.parametrize(
    ("recipe", "gib"),
    [
        ("qwen3_4b_tau2_8gpu", 46.6),
        ("qwen3_8b_lora_8gpu", 54.6),
        ("qwen3_8b_full_8gpu", 65.7),
        ("qwen3_32b_lora_8gpu", 108.4),
        ("qwen3_0.6b_1gpu", 22.4),
        ("qwen3_4b_vllm_8gpu", 43.3),
    ],
)
def test_a_recipe_tells_the_memory_that_it_needs_on_gpus(recipe, gib, monkeypatch):
    monkeypatch.setattr(Memory, "_could_run_here", lambda _: False)
    memory = Memory(load_recipe(recipe))
    assert memory.have == 80e9
    assert round(memory.need() / GIB, 1) == gib
    told = (ROOT / "recipes" / f"{recipe}.yaml").read_text().replace("\n# ", " ")
    assert f"as `--check` adds it up: {gib} GiB" in told


def test_the_memory_of_the_tiny_recipe_adds_up():
    settings = {"run": {"num_gpus": 2}, "rollout": {"tasks_per_step": 23}}
    count = tiny_model(tokenizer(), 0).num_parameters()
    memory = Memory(config(**settings))
    found = memory.terms()
    assert found["weights (fp32)"] == found["gradients"] == 4 * count
    assert found["moments of AdamW"] == 8 * count
    # 2 (keys, values) x 3 layers x 2 heads x 32 x 4 bytes x 256 tokens x 12 groups x 8 episodes
    assert found["key-value cache"] == 37_748_736
    assert "reference policy" not in found and "sampling copy" not in found
    activations = found["activations of a micro-batch"]
    assert memory.need() == sum(found.values()) - min(37_748_736, activations)


def test_a_run_on_a_checkpoint_of_adapters_is_checked(tmp_path):
    base = tiny_model(tokenizer(), 0)
    save(tmp_path, "base", base, tokenizer(), TrainState().state_dict())
    name = str(tmp_path / "base")
    adapters = lora.attach(base, ModelSettings(lora_r=2), name, 0)
    path = str(save(tmp_path, "stage-1-airline", adapters, tokenizer(), TrainState().state_dict()))
    plain, own = (config(model={"model": model}) for model in (name, path))
    assert Memory(own).terms() == Memory(plain).terms() == Memory(config()).terms()
    assert check_and_prepare(own, ALONE).tokenizer.chat_template == tokenizer().chat_template
    further = {"model": path, "use_peft": True}
    assert "LoRA adapters, twice" in Memory(config(model=further, warm_start={"steps": 0})).terms()


def test_wrong_targets_of_adapters_are_refused_before_anything_runs():
    model = {"use_peft": True, "lora_target_modules": ["q_proj", "w_proj"]}
    message = refusal(check_and_prepare, config(model=model), ALONE)
    says(message, "lora_target_modules: got 'w_proj'", "give linear layers", "q_proj")


def test_a_check_refuses_what_does_not_fit_on_a_rank_here_or_elsewhere(capsys):
    large = {"rollout": {"max_tokens": 10**9}}
    message = refusal(check.main, config(**large))
    assert re.match(r"memory: each rank needs \d+\.\d GiB \(CUDA or Python, and lib", message)
    assert re.search(r" \+ key-value cache \d+\.\d ", message)
    assert re.search(r"larger\) and has \d+\.\d; lower max_tokens or ", message)
    assert "does not fit" in capsys.readouterr().out
    for half in ({}, {"mixed_precision": "bf16"}):  # processors here, GPUs elsewhere
        there = config(**large, model=half, run={"num_gpus": 4096})
        says(
            refusal(check.main, there),
            "memory: each rank needs",
            "larger GPUs" if half else "fewer ranks",
        )
        assert "does not fit: a run would be refused" in capsys.readouterr().out


def test_as_many_episodes_play_at_once_as_fit(monkeypatch, capsys):
    large = config(rollout={"max_tokens": 4096, "max_concurrent_episodes": 100})
    large = large.changed("grpo", use_grpo=False).changed("evaluation", eval_trials=8)
    need = Memory(large).need()  # 3 domains x 6 tasks x 8 trials are more than 100 episodes
    monkeypatch.setattr(Memory, "have", need)
    assert check_and_prepare(large, ALONE).episodes_at_once == 100
    enough = Memory(large.changed("rollout", max_concurrent_episodes=40)).need()
    monkeypatch.setattr(Memory, "have", enough)
    assert check_and_prepare(large, ALONE).episodes_at_once == 40
    said = capsys.readouterr().out  # with a note on the tasks of so small a run
    assert said.count("at once") == 1
    assert said.endswith("note: 40 of 100 episodes at once, as many as fit into memory\n")
    assert large.rollout.max_concurrent_episodes == 100


# Preparation


def test_a_prompt_that_leaves_no_room_for_a_turn_is_refused():
    longest = prepare(config()).prompts.longest["airline"]
    fits = {"max_tokens": longest + 40, "max_tokens_per_turn": 40}
    none = {"steps": 0}  # whose demonstrations would have to fit as well
    prepare(config(rollout=fits, data={"domains": ["airline"]}, warm_start=none))
    shorter = config(rollout={**fits, "max_tokens": longest + 39}, warm_start=none)
    message = refusal(prepare, shorter)
    says(
        message,
        f"a prompt of airline has {longest} tokens",
        "a turn may take 40",
        f"max_tokens {longest + 40} (got {longest + 39})",
        "give --max-tokens ",
    )


BANK = '''
from pipeline.data.tasks import Task


class Bank:
    def reset(self, **row):
        pass

    def balance(self, account: str) -> str:
        """Tell the balance.

        Args:
            account: Number.
        """
        return "12"

    def get_reward(self):
        return 1.0
'''
GENERATE = """

def generate_tasks(seed, n, split, difficulty):
    prompt = ({"role": "user", "content": "how much is on A1?"},)
    return [Task(domain="bank", id=f"{split}-{i}", prompt=prompt, payload="{}") for i in range(n)]
"""


def bank(tmp_path, monkeypatch, name, code, **data):
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"domains": ["bank"], "environments": {"bank": f"{name}:Bank"}}
    return config(data={**own, **data}, warm_start={"steps": 0})


def test_what_a_terminal_would_obey_is_shown_and_not_obeyed(tmp_path, monkeypatch, capsys):
    """Task ids, families and requests that hold control characters."""
    hostile = 'f"{split}-{i}\\x1b]0;title\\x07", family="\\x9b2J", '
    code = BANK + GENERATE.replace('f"{split}-{i}", ', hostile).replace("A1?", "A1\\x1b[2J?")
    settings = bank(tmp_path, monkeypatch, "hostile_bank", code)
    assert prepare(settings).train["bank"][0].id == "train-0\x1b]0;title\x07"
    check.main(settings)
    said = capsys.readouterr().out
    says(
        said,
        "--- a prompt of bank (train-0\\x1b]0;title\\x07) ---",
        "how much is on A1\\x1b[2J?",
        "(\\x9b2J 30)",
    )
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", said)


# The run's folder


def test_a_folder_that_holds_a_run_is_refused_unless_it_is_resumed(tmp_path):
    settings = config(run={"output_dir": str(tmp_path)})
    resumed = {"output_dir": str(tmp_path), "resume_from_checkpoint": "latest", "seed": 9}
    begin_folder(open_folder(settings), settings, 1, 0, set())
    check_folder(settings)  # a start that failed, or a run without a checkpoint: begin anew
    assert "holds no checkpoint" in refusal(check_folder, config(run=resumed))
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    for refuse in (check_folder, open_folder, check.main):
        says(
            refusal(refuse, settings),
            f"output_dir: {tmp_path} holds a run",
            "--resume-from-checkpoint",
        )
    shutil.rmtree(tmp_path / "checkpoints")
    evaluates = config(run={"output_dir": str(tmp_path)}, grpo={"use_grpo": False})
    begin_folder(open_folder(settings), evaluates, 1, 0, set())
    check_folder(settings)
    (tmp_path / "results.json").write_text("{}")
    assert f"{tmp_path} holds a run" in refusal(check_folder, settings)


def test_what_a_run_without_a_checkpoint_has_written_is_moved_and_not_lost(tmp_path):
    settings = config(run={"output_dir": str(tmp_path)})
    for number in (1, 2):
        for _ in range(2):  # the second start finds nothing to keep
            opened = open_folder(settings)
            opened.lock.close()
            begin_folder(opened, settings, 1, 0, set())
        (tmp_path / "metrics.jsonl").write_text(f"{number}\n")
        (tmp_path / "trajectories" / "evaluation-start").mkdir(parents=True)
    opened = open_folder(settings)
    begin_folder(opened, settings, 1, 0, set())
    first, kept = tmp_path / "earlier-start-1", tmp_path / "earlier-start-2"
    assert opened.notes == [f"note: an earlier start left no checkpoint, but files: {kept}"]
    assert (first / "metrics.jsonl").read_text() == "1\n"
    moved = {path.name for path in kept.iterdir()}
    assert moved == {"config.yaml", "metrics.jsonl", "trajectories"}
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "trajectories").exists()


def test_a_run_that_is_still_stopping_keeps_its_folder(tmp_path):
    settings = config(run={"output_dir": str(tmp_path)})
    running = open_folder(settings)
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    for name in ("latest", "auto", "step-000001"):
        resumed = config(run={"output_dir": str(tmp_path), "resume_from_checkpoint": name})
        for refuse in (check_folder, check.main, open_folder):
            message = refusal(refuse, resumed)
            says(message, f"output_dir: {tmp_path} is in use by a run that is still alive")
    running.lock.close()
    for _ in range(2):  # a check leaves no lock
        check_folder(resumed)


def test_a_folder_with_other_files_is_fine(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert open_folder(config(run={"output_dir": str(tmp_path)})).folder == tmp_path


def test_a_policy_that_no_prompt_shows_is_a_warning(tmp_path):
    made = tiny_tokenizer()
    loop = "{%- for message in messages -%}"
    hiding = "{%- for message in messages if not (tools and message.role == 'system') -%}"
    made.chat_template = CHAT_TEMPLATE.replace(loop, hiding)
    made.save_pretrained(tmp_path)
    tiny_model(made, 0).save_pretrained(tmp_path)
    own = config(model={"model": str(tmp_path)}, warm_start={"steps": 0})
    said = "the chat template leaves all of the system message out of prompts"
    assert said in prepare(own).warnings
    made.chat_template = CHAT_TEMPLATE
    made.save_pretrained(tmp_path)
    for of_tiny in (config(), own):
        assert not [line for line in prepare(of_tiny).warnings if "leaves" in line]
