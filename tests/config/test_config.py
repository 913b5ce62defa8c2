"""Settings: recipes and flags fill one tree, and every mistake is refused in one line."""

import datetime
import json
import re
from pathlib import Path

import pytest
from trl import GRPOConfig

from pipeline.config.cli import build_parser, flag, flags_of, parse
from pipeline.config.recipe import SETTINGS, dump, full_name, instead, load_recipe, trl_names
from pipeline.config.rules import CONTRADICTIONS, WITHOUT_EFFECT, without_effect
from pipeline.config.settings import Config, GRPOSettings
from tests.support import ROOT, SMALL_RUN
from tests.support.messages import refusal, says


def short(value: object) -> str:
    return str(value)[:60]


RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes `own.yaml` into an otherwise empty working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes) -> str:
        Path("own.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return "own.yaml"

    return write


# What is accepted


def test_flags_override_the_recipe_and_the_recipe_overrides_the_defaults(recipe):
    name = recipe("grpo: {learning_rate: 5e-5, beta: 0.1}")
    config = parse(["--config", name, "--beta", "0.2"])
    assert config.grpo.learning_rate == 5e-5
    assert config.grpo.beta == 0.2
    assert config.grpo.epsilon == 0.2


def test_a_number_without_a_point_is_a_number_in_recipes_and_flags(recipe):
    assert load_recipe(recipe("grpo: {learning_rate: 1e-6}")).grpo.learning_rate == 1e-6
    assert parse(["--learning-rate", "1e-6"]).grpo.learning_rate == 1e-6


def test_no_and_dates_are_text_in_a_recipe(recipe):
    config = load_recipe(recipe("model: {mixed_precision: no}\ntracking: {run_name: 2026-11-21}"))
    assert config.model.mixed_precision == "no"
    assert config.tracking.run_name == "2026-11-21"


@pytest.mark.parametrize(
    ("argv", "section", "name", "value"),
    [
        (["--group-size", "4"], "rollout", "num_generations", 4),
        (["--num-generations=4"], "rollout", "num_generations", 4),
        (["--no_grpo"], "grpo", "use_grpo", False),
        (["--warm_start_learning_rate", "1e-3"], "warm_start", "learning_rate", 0.001),
        (["--run_name=a_b"], "tracking", "run_name", "a_b"),
        (["--use-grpo"], "grpo", "use_grpo", True),
        (["--no-grpo"], "grpo", "use_grpo", False),
        (["--check"], "run", "check", True),
        (["--check", "--no-check"], "run", "check", False),
        (["--seed", "1", "--seed", "2"], "run", "seed", 2),
        (["--task-seed", "-1"], "data", "task_seed", -1),
        (["--profile", "2,3"], "run", "profile", [2, 3]),
        (["--epsilon-high", "null"], "grpo", "epsilon_high", None),
        (["--run-name", "007"], "tracking", "run_name", "007"),
        (["--run-name", "null"], "tracking", "run_name", None),
        (["--output-dir", "runs/a b"], "run", "output_dir", Path("runs/a b")),
        (["--mixed-precision", "no"], "model", "mixed_precision", "no"),
        (["--domains", "telecom, airline"], "data", "domains", ["telecom", "airline"]),
        (["--report-to", "none"], "tracking", "report_to", []),
        (["--report-to", "wandb,tensorboard"], "tracking", "report_to", ["wandb", "tensorboard"]),
        (["--warm-start-learning-rate", "1e-3"], "warm_start", "learning_rate", 0.001),
        (["--stage-weights", "{retail: 2}"], "curriculum", "stage_weights", {"retail": 2.0}),
        (
            ["--chat-template-kwargs", "{enable_thinking: false}"],
            "model",
            "chat_template_kwargs",
            {"enable_thinking": False},
        ),
        (
            ["--environments", "{bank: my_pkg.bank:Bank}"],
            "data",
            "environments",
            {"bank": "my_pkg.bank:Bank"},
        ),
    ],
    ids=short,
)
def test_a_flag_sets_its_setting(argv, section, name, value):
    assert getattr(getattr(parse(argv), section), name) == value


def test_a_domain_of_ones_own_can_be_a_stage(recipe):
    name = recipe(
        "data: {domains: [bank, retail], environments: {bank: my_pkg.bank:Bank}}\n"
        "curriculum: {stage_weights: {bank: 2, airline: 1, mixed: 1}}"
    )
    assert load_recipe(name).data.domains == ["bank", "retail"]


@pytest.mark.parametrize("source", ["mixed", "mixed.yaml", "recipes/mixed", "recipes/mixed.yaml"])
def test_a_shipped_recipe_is_found_from_any_folder(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse(["--config", source]).recipe == "mixed"


def test_a_recipe_is_called_after_its_file_unless_it_says_otherwise(recipe):
    assert load_recipe(recipe("run: {seed: 3}")).recipe == "own"
    assert load_recipe(recipe("recipe: first\nrun:\n")).recipe == "first"


def test_without_config_the_tiny_recipe_is_used():
    assert parse([]).recipe == "three_domain_tiny"
    assert parse([]) == load_recipe(ROOT / "recipes" / "three_domain_tiny.yaml")


# The shipped recipes


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_parses_and_survives_a_round_trip(path, tmp_path):
    config = load_recipe(path)
    written = tmp_path / "config.yaml"
    written.write_text(dump(config))
    assert config.recipe == path.stem
    assert load_recipe(written) == config
    values = {full_name(*s): getattr(getattr(config, s[0]), s[1]) for s in SETTINGS}
    assert parse(flags_of(values)).model_copy(update={"recipe": path.stem}) == config


def test_dump_keeps_what_yaml_readers_would_take_for_something_else(tmp_path):
    argv = ["--mixed-precision", "no", "--run-name", "1e-6", "--tags", "1e5,yes,007,008,null,ü: #"]
    config = parse([*argv, "--learning-rate", "1e-6", "--output-dir", "null"])
    written = tmp_path / "config.yaml"
    written.write_text(dump(config))
    assert load_recipe(written) == config
    says(written.read_text(), "mixed_precision: 'no'", "learning_rate: 1.0e-06")


# Help


def test_help_groups_the_flags_and_shows_the_values_of_the_recipe(capsys):
    with pytest.raises(SystemExit) as exited:
        parse(["--config", "qwen3_4b_8gpu", "--help"])
    text = capsys.readouterr().out
    assert exited.value.code == 0
    headings = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [
        "examples:",
        "most used:",
        "model:",
        "tasks and rewards:",
        "customer (a language model):",
        "judge (a language model, for rewards):",
        "warm start (supervised):",
        "rejection fine-tuning (RFT):",
        "curriculum:",
        "rollout:",
        "GRPO:",
        "evaluation:",
        "agent (a language model to compare with):",
        "run:",
        "tracking:",
    ]
    assert {f"--{name}" for name in re.findall(r"^  --([a-z0-9-]+)", text, re.MULTILINE)} == {
        *("--config", "--env", "--num-generations"),
        *(flag(*key) for key in SETTINGS),
    }
    says(
        text,
        "--num-generations N, --group-size N",
        "--use-grpo                      train with GRPO; --no-grpo: evaluate only [true]",
    )
    most_used = text.partition("most used:")[2].partition("model:")[0]
    assert re.findall(r"^  (?:-h, )?--([a-z-]+)", most_used, re.MULTILINE) == [
        *("help", "config", "env", "model", "domains", "num-gpus", "max-steps", "num-generations"),
        *("learning-rate", "output-dir", "resume-from-checkpoint", "check"),
    ]
    assert max(map(len, text.splitlines())) <= 100
    says(
        text,
        "--learning-rate X               peak; null: what suits the model [1e-05]",
        "--domains A,B                   domains, in the order of the stages [airline,",
    )


# What is refused


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--learning-rte", "1"], ("unknown flag --learning-rte", "did you mean --learning-rate?")),
        (["--topk", "3"], ("unknown flag --topk;", "did you mean --top-k?")),
        (["--resume", "latest"], ("unknown flag --resume;", "mean --resume-from-checkpoint?")),
        (["--learning", "1"], ("unknown flag --learning;", "did you mean --learning-rate?")),
        (["--zzz=1"], ("unknown flag --zzz", "--help")),
        (
            ["--domains", "telecom", "airline"],
            ("'airline'", "separated by commas", "--config RECIPE"),
        ),
        (["--seed"], ("--seed", "one argument", "--help")),
        (["--check=yes"], ("--check", "'yes'", "--help")),
        (["--learning-rate", "fast"], ("--learning-rate: got 'fast'", "a valid number")),
        (["--learning-rate", "0"], ("--learning-rate: got 0;", "greater than 0")),
        (["--learning-rate", "["], ("--learning-rate: got '['", "a valid number")),
        (["--temperature", ".inf"], ("--temperature: got inf", "a finite number")),
        (["--seed", "true"], ("--seed: got True", "not be empty, true or false")),
        (["--seed", "null"], ("--seed: got None", "a valid integer")),
        (["--max-steps", "1.5"], ("--max-steps: got 1.5", "a valid integer")),
        (["--group-size", "1"], ("--num-generations: got 1", "greater than or equal to 2")),
        (["--tasks", "{airline:a.jsonl}"], ("{airline:a.jsonl}", "a space after each colon")),
        (["--profile", "0"], ("--profile: got '0'", "greater than 0")),
        (["--model", ""], ("--model: got ''", "not be empty")),
        (["--output-dir="], ("--output-dir: got ''", "not be empty")),
        (
            ["--mixed-precision", "fp16"],
            ("--mixed-precision: got 'fp16'", "'auto', 'bf16' or 'no'"),
        ),
        (
            ["--report-to", "mlflow"],
            ("--report-to: got 'mlflow'", "'wandb', 'tensorboard' or 'trackio'"),
        ),
        (["--domains", "none"], ("--domains: got []", "at least 1 item")),
        (
            ["--stage-weights", "{retail: 0}"],
            ("--stage-weights: got 0", "greater than 0"),
        ),
        (
            ["--chat-template-kwargs", "fast"],
            ("--chat-template-kwargs: got 'fast'", "a valid dictionary"),
        ),
        (["--config", "mixd"], ("--config: got 'mixd'", "forgetting", "did you mean mixed?")),
        (
            ["--config", "elsewhere/mixed.yaml", "--help"],
            ("--config: got 'elsewhere/mixed.yaml'", "forgetting", "did you mean mixed?"),
        ),
        (["--config", "/tmp"], ("--config: got '/tmp'", "no file", "give")),
        (["--config", "x" * 5000], ("--config", "xxx...", "no file")),
        (["--config", "https://me:my@secret@hub.example/x"], ("https://***@hub.example/x",)),
        (["--run-name", "\udcff"], ("--run-name", "\\udcff", "Unicode")),
        (["--tags", "hf_" + "a" * 34], ("--tags", "password or a token", "environment")),
    ],
    ids=short,
)
def test_a_wrong_command_line_is_refused_in_one_line(argv, words):
    line = refusal(parse, argv)
    says(line, *words)
    assert len(line) < 600
    assert "secret" not in line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--domains", "airline,retial"],
            ("domains: got 'retial'", "telecom", "`environments`"),
        ),
        (["--domains", "retail,retail"], ("domains: got retail,retail", "each once")),
        (
            ["--environments", "{airline: a:B}"],
            ("environments: got airline", "taken", "another name"),
        ),
        (["--environments", "{mixed: a:B}"], ("environments: got mixed", "taken", "another name")),
        *(
            (
                ["--environments", f"{{bank: a:B, {name}: a:B}}"],
                (f"environments: got {name},", "taken", "another name"),
            )
            for name in ("mean", "start", "rft-1", "evaluation-bank", "Bank", "Mean", "MIXED")
        ),
        (
            ["--environments", "{" + "b" * 65 + ": a:B}"],
            ("environments: got the name 'bbb", "at most 64"),
        ),
        *(
            (
                ["--environments", json.dumps({name: "a:B"})],
                (f"environments: got the name {name!r}", "letters, digits"),
            )
            for name in ("a bank", "a/b", "bank\x1b[2J", "bänk", "bank\n", "-bank")
        ),
        (
            ["--environments", "{../bank: a:B}"],
            ("environments: got the name '../bank'", "letters, digits"),
        ),
        (
            ["--environments", "{bank: my_pkg.bank}"],
            ("environments: got bank: 'my_pkg.bank'", "module:Class"),
        ),
        (
            ["--stage-weights", "{bank: 2}"],
            ("stage_weights: got 'bank'", "name stages", "interleaved"),
        ),
        (
            ["--stage-steps", "{retail-2: 5}"],
            ("stage_steps: got 'retail-2'", "name stages", "telecom"),
        ),
        (["--order", "airline,bank"], ("order: got 'bank'", "name domains", "telecom")),
        (
            ["--order", "airline", "--curriculum", "mixed"],
            ("order: got airline", "mixed", "take one"),
        ),
        (
            ["--curriculum", "separate", "--domains", "retail"],
            ("curriculum: got separate for retail alone", "more domains"),
        ),
        (
            ["--curriculum", "separate", "--order", "airline,retail,airline"],
            ("order: got airline,retail,airline with curriculum separate", "each domain once"),
        ),
        (
            ["--curriculum", "separate", "--stage-steps", "{merge: 5}"],
            ("stage_steps: got 'merge'", "name stages (airline, retail, telecom)"),
        ),
        (
            [
                *("--curriculum", "separate", "--merge-method", "distillation"),
                *("--importance-sampling-level", "sequence"),
            ],
            ("importance_sampling_level: got sequence with merge_method distillation", "token"),
        ),
        (
            ["--curriculum", "separate", "--use-peft"],
            ("merge_method: got task_arithmetic with use_peft", "train all weights"),
        ),
        (
            ["--curriculum", "separate", "--keep-best"],
            ("keep_best: got true with curriculum separate", "take it out"),
        ),
        (
            ["--stage-steps", "{airline: 5}", "--stage-tasks", "{airline: 50}"],
            ("stage_tasks: got airline", "stage_steps", "give one"),
        ),
        (
            ["--plateau-patience", "2", "--validation-steps", "0"],
            ("plateau_patience", "validation_steps", "take it out"),
        ),
        (
            ["--difficulties", "easy", "--stage-steps", "{airline: 7}"],
            ("stage_steps: got 'airline'", "name stages", "airline-easy"),
        ),
        (
            ["--attn-implementation", "foo"],
            ("attn_implementation: got 'foo'", "give sdpa or eager to the tiny model"),
        ),
        (["--difficulties", "easy,easy"], ("difficulties: got easy,easy", "each once")),
        (["--profile", "9", "--max-steps", "8"], ("profile: got step 9, but 8 are trained",)),
        (["--profile", "1", "--no-grpo"], ("profile: got step 1, but 0 are trained",)),
        (
            ["--domain-advantage-scale", "{bank: 2}"],
            ("domain_advantage_scale: got 'bank'", "name domains"),
        ),
        (["--family-shares", "{bank: {a: 0.5}}"], ("family_shares: got 'bank'", "name domains")),
        (
            ["--family-shares", "{airline: {a: 0.6, b: 0.6}}"],
            ("family_shares: airline: got the sum 1.2", "at most 1"),
        ),
        (["--max-repeated-calls", "1"], ("max_repeated_calls: got 1", "2 or more, or 0")),
        (
            ["--max-tokens", "40", "--max-tokens-per-turn", "40"],
            ("max_tokens: got 40", "max_tokens_per_turn 40", "more than one turn"),
        ),
        (
            ["--epsilon", "0.3", "--epsilon-high", "0.28"],
            ("epsilon_high: got 0.28", "epsilon 0.3", "or null"),
        ),
    ],
    ids=short,
)
def test_settings_that_contradict_each_other_are_refused(argv, words):
    says(refusal(parse, argv), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grop: {beta: 0}", ("section grop;", "did you mean grpo?")),
        ("1: 2", ("section 1;", "--help")),
        ("beta: 0", ("section beta;", "in section grpo")),
        ("learning_rate: 1e-6", ("section learning_rate;", "learning_rate in section grpo")),
        (
            "vllm_importance_sampling_mode: token_mask",
            ("section vllm_importance_sampling_mode;", "in section grpo"),
        ),
        ("grpo: {lerning_rate: 1}", ("setting grpo.lerning_rate;", "did you mean learning_rate?")),
        ("data: {customer_url: x}", ("setting data.customer_url;", "url in section customer")),
        ("data: {customer: llm}", ("customer: write `customer_url` for a language model",)),
        ("model: {seed: 1}", ("setting model.seed;", "in section run")),
        ("grpo: {zzz: 1}", ("setting grpo.zzz;", "--help")),
        (
            "rollout: {group_size: 8}",
            ("group_size: called `num_generations` here",),
        ),
        ("curriculum: mixed", ("curriculum: got 'mixed'", "indented")),
        ("run: {check: 3}", ("run.check: got 3", "a valid boolean")),
        ("data: {tasks_per_domain: true}", ("data.tasks_per_domain: got True", "true or false")),
        ("tracking: {run_name: 7}", ("tracking.run_name: got 7", "a valid string")),
        ("tracking: {tags: [7]}", ("tracking.tags.0: got 7", "a valid string")),
        ("tracking: {tags: a}", ("tracking.tags: got 'a'", "a valid list")),
        ("recipe: [a]", ("recipe: got ['a']", "a valid string")),
        ("grpo:\n  beta: 0\n  beta: 1", ("line 3", "beta is given twice", "correct")),
        ("run:\n  seed: 1: 2", ("line 2", "mapping values", "correct")),
        ("a: *b", ("line 1", "alias 'b'", "correct")),
        ("run: !!python/object:os.system {}", ("line 1", "constructor", "os.system", "correct")),
        ("- a", ("no mapping", "write sections")),
        ("# nothing", ("no mapping", "write sections")),
        ("", ("no mapping", "write sections")),
        ("run: {seed: 1", ("expected ',' or '}'", "correct")),
        ("run: {check: !!bool perhaps}", ("'perhaps'", "correct")),
        (f"run: {{seed: {'9' * 5000}}}", ("4300 digits", "correct")),
        ("run: {seed: 4294967296}", ("run.seed", "4294967296", "less than or equal to")),
        ("model: {chat_template_kwargs: {a: .nan}}", ("chat_template_kwargs", "nan", "finite")),
        (b"run: {seed: 1} # \xe9", ("utf-8", "correct")),
        (b"\xff\xfe\x00", ("'utf-8'", "0xff", "correct")),
        ("run: {}".encode("utf-16-le"), ("unacceptable character", "#x0000")),
        ("#" * 70_000, ("64 KiB", "correct")),
        ('tracking: {project: "\\ud800"}', ("tracking.project", "\\ud800", "Unicode")),
        ('"a\\nb": 1', ("section a b", "--help")),
        ("model: {model: 'https://me:secret@hub.example/x'}", ("password", "HF_TOKEN")),
        ("rollout: {max_tokens: 30}", ("max_tokens", "max_tokens_per_turn 40", "one turn")),
        (
            "grpo: {dynamic_sampling: true, drop_zero_std_groups: false}",
            ("drop_zero_std_groups", "dynamic_sampling", "take one"),
        ),
        (
            "grpo: {loss_type: cispo, epsilon_high: 5, delta: 7}",
            ("delta", "cispo", "take it out"),
        ),
        ("grpo: {scale_lr: sqrt}", ("scale_lr", "reference_tasks_per_step", "give")),
        (
            "grpo: {vllm_importance_sampling_mode: token}",
            ("vllm_importance_sampling_mode: got 'token'", "'token_mask'", "'sequence_truncate'"),
        ),
        (
            "grpo: {vllm_importance_sampling_clip_max: 0}",
            ("vllm_importance_sampling_clip_max: got 0", "greater than 0"),
        ),
        (
            "grpo: {vllm_importance_sampling_clip_min: 3}",
            ("clip_min: got 3.0", "vllm_importance_sampling_clip_max 3.0", "give less, or null"),
        ),
        (
            "grpo: {vllm_importance_sampling_cap: 2}",
            ("vllm_importance_sampling_cap: called `vllm_importance_sampling_clip_max` here",),
        ),
    ],
    ids=short,
)
def test_a_wrong_recipe_is_refused_in_one_line(text, words, recipe):
    name = recipe(text)
    line = refusal(parse, ["--config", name])
    says(line, *words)
    assert len(line) < 600
    assert "secret" not in line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lr", "lr: called `learning_rate` here"),
        ("use_lora", "use_lora: called `use_peft` here"),
        ("bf16", "bf16: write `mixed_precision` bf16"),
        ("vllm_mode", "vllm_mode: write `sampler` vllm"),
        ("vllm_importance_sampling_cap", "cap: called `vllm_importance_sampling_clip_max` here"),
        ("dataset_name", "write `domains` DOMAIN and `tasks` '{DOMAIN: SOURCE}'"),
        ("steps", "write `max_steps` for GRPO, or `warm_start_steps` for the warm start"),
        ("per_device_train_batch_size", "`tasks_per_step` groups of `num_generations`"),
        ("gradient_accumulation_steps", "`max_tokens_per_microbatch`; set these"),
        ("eval_steps", "set `validation_steps` for those in between"),
        ("no_sync_ref_model", "`reference_per_stage` sets one per stage"),
        ("warmup_steps", "set `stage_warmup_steps`"),
    ],
)
def test_a_name_of_trl_is_answered_with_what_is_here(name, words, recipe):
    flag = f"--{name.replace('_', '-')}"
    for written in (flag, f"--{name}=4"):
        says(refusal(parse, [written]), written.partition("=")[0], words.partition(": ")[2])
    for text in (f"grpo: {{{name}: 4}}", f"{name}: {{}}"):
        says(refusal(load_recipe, recipe(text)), f"own.yaml: {name}: ", words)


def test_the_correction_has_trls_names_and_defaults():
    name = "vllm_importance_sampling_"
    options = GRPOConfig(use_cpu=True, bf16=False)
    found = {n: value for n, value in GRPOSettings() if n.startswith(name)}
    assert found == {n: getattr(options, n) for n in found}
    given = ["--sampler", "vllm", "--vllm-importance-sampling-clip-min", "0.5"]
    assert parse(given).grpo.vllm_importance_sampling_clip_min == 0.5
    partial = ["--partial-rollout-tokens", "8"]
    for argv, corrects in (
        (given, True),
        ([*given, "--no-vllm-importance-sampling-correction"], False),
        ([], False),
        (["--sampler", "generate"], False),
        ([*partial, "--sampler", "vllm"], True),
        (partial, False),
        ([*partial, "--partial-rollout-correction"], True),
        ([*partial, "--partial-rollout-correction", "--max-staleness", "0"], False),
    ):
        assert parse(argv).corrects_sampling == corrects
    assert without_effect(parse(given)) == []
    (line,) = without_effect(parse(given[2:]))
    needed = "sampler vllm, or partial_rollout_correction"
    assert line == f"vllm_importance_sampling_clip_min: has no effect without {needed}"
    assert without_effect(parse([*given[2:], *partial, "--partial-rollout-correction"])) == []
    for useless in ([*partial, "--max-staleness", "0"], ["--partial-rollout-tokens", "256"]):
        (line,) = without_effect(parse(useless))
        assert "partial_rollout_tokens: got " in line and "no effect with max_tokens 256" in line
    (line,) = without_effect(parse(["--max-staleness", "2"]))
    assert line == "max_staleness: has no effect without partial_rollout_tokens"
    (line,) = without_effect(parse(["--vllm-memory", "0.5"]))
    assert line == "vllm_memory: has no effect without sampler vllm"


def test_what_only_experts_or_only_a_sequence_use_is_told():
    separate = ["--curriculum", "separate"]
    density = ["--merge-density", "0.3"]
    assert without_effect(parse([*separate, "--merge-method", "ties", *density])) == []
    needs_ties = "merge_density: has no effect without curriculum separate and merge_method ties"
    assert without_effect(parse([*separate, *density])) == [needs_ties]
    assert without_effect(parse([*separate, "--replay", "0.1"])) == [
        "replay: has no effect without curriculum sequential"
    ]
    taught = [*separate, "--merge-method", "distillation", "--use-peft"]
    assert without_effect(parse([*taught, "--domain-weights", "{airline: 2}"])) == []
    assert without_effect(parse([*taught, "--merge-weight", "0.4"])) == [
        "merge_weight: has no effect without merge_method task_arithmetic or ties"
    ]
    assert without_effect(parse(["--merge-weight", "0.4"])) == [
        "merge_weight: has no effect without curriculum separate"
    ]


def test_one_domain_of_a_run_with_experts_can_be_evaluated():
    separate = ["--curriculum", "separate", "--domains", "retail"]
    assert parse([*separate, "--no-grpo"]).data.domains == ["retail"]


def test_a_term_for_learned_domains_without_any_is_a_line():
    name = "learned_beta: has no effect, because no stage goes on from one of another domain"
    weight = ["--learned-beta", "0.1"]
    assert without_effect(parse(weight)) == []
    for flags in (["--curriculum=mixed"], ["--curriculum=separate"], ["--domains=retail"]):
        assert without_effect(parse([*weight, *flags])) == [name]
    assert without_effect(parse([*weight, "--no-grpo"])) == []  # an evaluation trains nothing
    (line,) = without_effect(parse(["--learned-beta-tasks", "4"]))
    assert line == "learned_beta_tasks: has no effect without learned_beta"


def test_every_row_of_the_rules_is_of_a_setting_and_can_be_told():
    names = {name for _, name in SETTINGS}
    for row in (*CONTRADICTIONS, *WITHOUT_EFFECT):
        assert row.setting in names
        message = row.message(Config())
        assert message.startswith(f"{row.setting}: ") and not {*"{}\n"} & {*message}


@pytest.mark.parametrize(
    ("section", "name"), [("tracking", "report_to"), ("data", "reward_funcs"), ("run", "profile")]
)
def test_none_is_an_empty_list_in_a_recipe_as_in_a_flag(section, name, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(f"{section}:\n  {name}: none\n", encoding="utf-8")
    assert getattr(getattr(load_recipe(path), section), name) == []


def test_the_file_of_an_earlier_run_may_have_settings_that_are_gone(tmp_path):
    """A recipe with a value that no run has now is refused; a run can still be read."""
    path = SMALL_RUN / "config.yaml"
    assert "plateau_delta: 0.01" in path.read_text() and "permute_rewards" in path.read_text()
    assert load_recipe(path).curriculum.plateau_patience == 0
    changed = tmp_path / "config.yaml"
    changed.write_text(path.read_text().replace("plateau_delta: 0.01", "plateau_delta: 0.05"))
    says(refusal(load_recipe, changed), "plateau_delta: a gain of 0.01 is progress")
    (tmp_path / "metrics.jsonl").touch()
    assert load_recipe(changed).curriculum.plateau_patience == 0


def test_each_answer_names_present_settings():
    known = {flag(*key)[2:].replace("-", "_") for key in SETTINGS}
    for name in " ".join(trl_names()).split():
        line = instead(f"--{name.replace('*', 'x')}")
        settings = re.findall("`(.*?)`", line)
        assert settings or "ACCELERATE_USE_CPU" in line or "scripts/proofs/control.py" in line
        assert {*settings} <= known, line


def test_task_files_are_named_by_domain():
    own = ["--domains", "bank,airline", "--environments", "{bank: 'my_pkg.bank:Bank'}"]
    assert parse([*own, "--tasks", "{bank: org/name}"]).data.tasks == {"bank": "org/name"}
    for value, words in (
        ("{retail: a.jsonl}", ("tasks: got 'retail'", "name domains", "(bank, airline)")),
        ("{bank: ''}", ("--tasks: got ''", "at least 1 character")),
        ("a.jsonl", ("--tasks: got 'a.jsonl'", "a valid dictionary")),
    ):
        says(refusal(parse, [*own, "--tasks", value]), *words)


def test_help_shows_an_environment_with_arguments_as_its_flag_takes_it():
    factory = {"factory": "desk:Desk", "arguments": {"since": datetime.date(2026, 1, 2)}}
    config = Config.model_validate({"data": {"environments": {"desk": factory}}})
    found = " ".join(build_parser(config).format_help().split())
    assert '{"desk": {"factory": "desk:Desk", "arguments": {"since": "2026-01-02"}}}' in found
