"""The losses, advantages and repeated updates are those of TRL's own GRPOTrainer, in float64.

One rank, no accumulation: there TRL's normalisers (of its micro-batch for grpo, bnpo and dr_grpo,
of the step's tokens for dapo and cispo) are those of the whole step, which ours always are.
"""

from functools import partial
from random import Random

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset

from pipeline.config.settings import Config, GRPOSettings, RolloutSettings
from pipeline.distributed.ranks import Ranks
from pipeline.training.grpo import group_advantages, grpo_loss, importance_ratios, token_weights
from pipeline.training.micro_batches import make_micro_batches, with_trainer_logprobs
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Reference, Updater
from scripts.proofs.grid import make_trajectory, small_model
from tests.support.helpers import tokenizer
from tests.support.plain_losses import PLAIN_LOSSES

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 1e-10  # relative
MAX_TOKENS = 64  # the constant of dr_grpo
TEMPERATURE = 0.8
LOSS_TYPES = [name for name, plain in PLAIN_LOSSES.items() if plain.is_in_trl]
LEVELS = ["token", "sequence"]
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
OF_THE_LOSS = {  # settings of ours that TRL has under the same names
    *("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta", "beta"),
    *(
        "use_bias_correction_kl",
        "entropy_coef",
        "num_iterations",
        "max_grad_norm",
        "learning_rate",
        "adam_beta2",
    ),
    *(name for name in GRPOSettings.model_fields if name.startswith("vllm_")),
}
VARIANTS = {
    "plain": {"epsilon": 0.2, "epsilon_high": None},
    "epsilon_high": {"epsilon": 0.2, "epsilon_high": 0.4},
    "delta": {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 1.7},
    "beta": {"epsilon": 0.2, "beta": 0.3},
    "entropy": {"epsilon": 0.2, "entropy_coef": 0.05},
    "corrected": {"epsilon": 0.2, "beta": 0.3, "use_bias_correction_kl": True},
    "everything": {"epsilon": 0.1, "delta": 2.0, "beta": 0.3, "entropy_coef": 0.05},
}
VARIANTS_OF_CISPO = {  # epsilon_high is the largest ratio itself, and there is no delta
    "plain": {"epsilon": 1.1, "epsilon_high": None},
    "epsilon_high": {"epsilon_high": 1.6},
    "beta": {"epsilon_high": 1.6, "beta": 0.3},
    "entropy": {"epsilon_high": 1.6, "entropy_coef": 0.05},
    "corrected": {"epsilon_high": 1.6, "beta": 0.3, "use_bias_correction_kl": True},
    "everything": {"epsilon_high": 1.2, "beta": 0.3, "entropy_coef": 0.05},
}
# How far the logarithms of an episode's ratios lie from 0, and its advantage: each side of the
# clips with either sign, inside of them, far beyond them, and without an advantage.
EPISODES = [
    *((0.0, 1.0), (0.0, -0.8), (0.5, 1.5), (0.5, -1.2)),
    *((-0.5, 0.7), (-0.5, -0.6), (1.0, -2.0), (1.0, 0.4)),
    *((-1.0, -0.9), (0.3, 0.0), (0.1, 2.5), (-0.1, -1.1)),
]
REWARDS = [1.0, 0.0, 0.25, 0.0, 0.3, 0.3, 0.3, 0.3, -1.0, 2.0, 0.5, 0.5]  # a group is dead
FLOAT32, TO_FLOAT32 = torch.float32, torch.Tensor.float


@pytest.fixture(scope="module", autouse=True)
def _whoever_asks_for_float32_gets_float64():
    """TRL's fused head, and the norms and rotations of transformers, calculate in float32 whatever
    the model's type.
    """
    torch.set_default_dtype(torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield
    torch.set_default_dtype(torch.float32)


def new_model():
    return small_model(0, torch.float64, vocab_size=len(tokenizer()))


def reference_model():
    """The policy moved a little."""
    model = new_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def reference_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    reference_model().save_pretrained(folder)
    return folder


def with_logprobs(row, noise=lambda: 0.0):
    """The episode as if the new policy had sampled it, with noise."""
    logprobs = []
    if row.num_sampled_tokens:
        (batch,) = make_micro_batches([(row, 0.0, 1.0)], 1000, 0)
        with torch.no_grad():
            logprobs = TokenLogprobs(new_model(), TEMPERATURE)(batch)[0].tolist()
    numbers = iter(logprobs)
    stored = [next(numbers) - noise() if sampled else 0.0 for sampled in row.loss_mask]
    return make_trajectory(row.prompt_ids, row.completion_ids, row.loss_mask, logprobs=stored)


@pytest.fixture(scope="module")
def episodes():
    """Episodes of one to four turns, the last without a sampled token, and their advantages."""
    random = Random(3)
    found = []
    for number, (shift, advantage) in enumerate(EPISODES, 1):
        mask = [1] * random.randint(1, 8)
        for _ in range(random.randint(0, 3)):  # what a tool says, and the next turn
            mask += [0] * random.randint(1, 4) + [1] * random.randint(1, 6)
        mask = [0, 0, 0] if number == len(EPISODES) else mask
        prompt = [random.randrange(100, 200) for _ in range(random.randint(1, 6))]
        row = make_trajectory(prompt, [random.randrange(100, 800) for _ in mask], mask)
        found.append((with_logprobs(row, partial(random.gauss, shift, 0.2)), advantage))
    return found


def settings_of(loss_type, level="token", variant="plain", **more):
    values = (VARIANTS_OF_CISPO if loss_type == "cispo" else VARIANTS)[variant]
    values = {"entropy_coef": 0.0, **values, **more}
    return GRPOSettings(loss_type=loss_type, importance_sampling_level=level, **values)


# TRL


def make_trainer(settings, folders, episodes, rewards=REWARDS, **options):
    """TRL's trainer of our settings; its rollouts are these episodes."""
    from trl import GRPOConfig, GRPOTrainer  # in 2 s, which other files need not wait for

    rows = [row for row, _ in episodes]

    def rollout(prompts, trainer):
        assert len(prompts) == len(rows)
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.completion_ids for row in rows],
            "env_mask": [[int(sampled) for sampled in row.loss_mask] for row in rows],
            "logprobs": [row.logprobs for row in rows],
        }

    model = new_model()
    model.config._name_or_path = str(folders[1])  # where TRL finds its reference model
    values = {
        "output_dir": str(folders[0]),
        "per_device_train_batch_size": len(rows),
        "num_generations": 4,
        "max_completion_length": MAX_TOKENS,
        "temperature": TEMPERATURE,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
    }
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: rewards,
        args=GRPOConfig(**{**values, **settings.model_dump(include=OF_THE_LOSS), **options}),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * len(rows)),
        processing_class=tokenizer(),
        rollout_func=rollout,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer._last_loaded_step = 0  # with `use_vllm`, no engine gets weights
    return trainer


def gradients(model):
    assert all(parameter.grad.dtype == torch.float64 for parameter in model.parameters())
    return [parameter.grad for parameter in model.parameters()]


def move(model):
    """Move the policy, as the first of several updates of a step does."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return model


def trls(settings, folders, episodes, corrects=False):
    """TRL's loss, gradients and metrics; `corrects`: where vLLM has sampled the episodes."""
    trainer = make_trainer(settings, folders, episodes)
    trainer.use_vllm = corrects
    # prompts padded on the left, completions on the right
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * len(episodes))
    inputs["advantages"] = torch.tensor([advantage for _, advantage in episodes])
    if corrects:
        move(trainer.model)
    else:
        inputs["old_per_token_logps"] = old = torch.zeros(inputs["completion_ids"].shape)
        for number, (row, _) in enumerate(episodes):
            old[number, : len(row.logprobs)] = torch.tensor(row.logprobs)
    loss = trainer._compute_loss(trainer.model, inputs)
    assert loss.dtype == torch.float64
    loss.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss.item(), gradients(trainer.model), metrics


# Ours


def ours(settings, episodes, budget=10_000, *layout, corrects=False):
    """Our loss, gradients and the statistics of the micro-batches.

    `corrects`: the policy has moved since the trainer's log-probabilities were computed, in
    micro-batches of another size.
    """
    model = new_model()
    module = TokenLogprobs(model, TEMPERATURE)
    reference = TokenLogprobs(reference_model(), TEMPERATURE) if settings.beta > 0 else None
    lengths = [row.num_sampled_tokens for row, _ in episodes]
    weights = token_weights(lengths, settings.loss_type, len(lengths), sum(lengths), MAX_TOKENS)
    items = [(*episode, weight) for episode, weight in zip(episodes, weights, strict=True)]
    batches = make_micro_batches(items, budget, 0, *layout)
    assert (len(batches) == 1) == (budget == 10_000)
    if corrects:
        first = make_micro_batches(items, 70, 0, *layout)
        assert 1 < len(first) != len(batches)
        with torch.no_grad():
            known = [module(batch)[0][batch.order] for batch in first]
        move(model)
        batches = with_trainer_logprobs(batches, known)
    found = []
    for batch in batches:
        assert batch.weights.dtype == batch.old_logprobs.dtype == torch.float64
        logprobs, entropy = module(batch)
        with torch.no_grad():
            ref_logprobs = None if reference is None else reference(batch)[0]
        loss, stats = grpo_loss(logprobs, entropy, batch, settings, sum(lengths), ref_logprobs)
        assert logprobs.dtype == entropy.dtype == loss.dtype == torch.float64
        loss.backward()
        found.append(stats)
    return sum(float(stats.loss) for stats in found), gradients(model), found


def largest_difference(found, expected):
    """Of the parameters' gradients: relative, by norms."""
    assert all(float(value.norm()) > 1e-6 for value in expected)
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


# What is compared


@pytest.mark.parametrize("level", LEVELS)
def test_the_episodes_reach_every_branch_of_the_losses(episodes, level):
    (batch,) = make_micro_batches([(*episode, 1.0) for episode in episodes], 10_000, 0)
    with torch.no_grad():
        logprobs = TokenLogprobs(new_model(), TEMPERATURE)(batch)[0]
    ratio = importance_ratios(logprobs, batch, level)
    good, bad = batch.advantages > 0, batch.advantages < 0
    assert (batch.advantages == 0).any()
    for reached in (ratio < 0.8, (ratio > 0.85) & (ratio < 1.15), ratio > 1.4, ratio > 2.0):
        assert (reached & good).any() and (reached & bad).any()
    assert ratio.min() < 0.5 and ratio.max() > 2.5


# The comparisons

TELLING = ("dapo", "cispo")  # the others differ from dapo in the weights of tokens alone
GRID = [
    pytest.param(
        *(loss_type, level, variant),
        marks=()
        if (loss_type in TELLING and level == "token") or variant == "everything"
        else pytest.mark.proof,
    )
    for loss_type in LOSS_TYPES
    for level in LEVELS
    for variant in (VARIANTS_OF_CISPO if loss_type == "cispo" else VARIANTS)
]


@pytest.mark.parametrize(("loss_type", "level", "variant"), GRID)
def test_the_loss_and_its_gradient_are_trls(
    episodes, tmp_path, reference_folder, loss_type, level, variant
):
    settings = settings_of(loss_type, level, variant)
    expected, its_gradients, metrics = trls(settings, (tmp_path, reference_folder), episodes)
    loss, found, (sums,) = ours(settings, episodes)
    assert loss == pytest.approx(expected, rel=TOLERANCE)
    assert largest_difference(found, its_gradients) < TOLERANCE
    num_tokens = sum(row.num_sampled_tokens for row, _ in episodes)
    assert float(sums.entropy) / num_tokens == pytest.approx(metrics["entropy"], rel=TOLERANCE)
    if settings.beta > 0 and not settings.use_bias_correction_kl:  # TRL logs the corrected one
        assert float(sums.kl) / num_tokens == pytest.approx(metrics["kl"], rel=TOLERANCE)
    if variant == "entropy":  # TRL's policy loss holds the divergence, and is logged with a bonus
        assert float(sums.policy_loss) == pytest.approx(metrics["policy_loss"], rel=TOLERANCE)
    if level == "token" and settings.delta is None:  # TRL counts clipped sequences, and no delta
        name = "cispo_clip_ratio" if loss_type == "cispo" else "clip_ratio/region_mean"
        assert float(sums.clipped) / num_tokens == pytest.approx(metrics[name], rel=TOLERANCE)
    if level == "token" and loss_type != "cispo":
        for at in ("low", "high"):
            found = float(getattr(sums, f"clipped_{at}")) / num_tokens
            assert found == pytest.approx(metrics[f"clip_ratio/{at}_mean"], rel=TOLERANCE) and found


# Ratios of tokens, and of sequences, that the clips of the correction truncate or mask
CLIPS = {"token": (0.6, 1.7), "sequence": (0.02, 3.0)}
CORRECTED = [
    pytest.param(
        *(loss_type, mode, level),
        marks=()
        if (loss_type, level) == ("dapo", "token") or (mode, level) == ("sequence_mask", "sequence")
        else pytest.mark.proof,
    )
    for loss_type in LOSS_TYPES
    for mode in MODES
    for level in LEVELS
]


def corrected(loss_type, mode, level="token", **more):
    low, high = CLIPS[mode.partition("_")[0]]
    clips = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    mode = {"vllm_importance_sampling_mode": mode}
    return settings_of(loss_type, level, "everything", **mode, **clips, **more)


@pytest.mark.parametrize(("loss_type", "mode", "level"), CORRECTED)
def test_the_corrected_loss_and_its_gradient_are_trls(
    episodes, tmp_path, reference_folder, loss_type, mode, level
):
    settings, folders = corrected(loss_type, mode, level), (tmp_path, reference_folder)
    plain, _, _ = ours(settings, episodes)
    loss, found, metrics = trls(settings, folders, episodes, corrects=True)
    for layout in ((40, True), (100, False, True)):
        own, its_gradients, stats = ours(settings, episodes, *layout, corrects=True)
        assert own == pytest.approx(loss, rel=TOLERANCE)
        assert largest_difference(its_gradients, found) < TOLERANCE
        assert abs(own - plain) > 1e-3
    gap, ratio = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"

    def values(name):
        return torch.stack([getattr(part, name) for part in stats])

    num_tokens = sum(row.num_sampled_tokens for row, _ in episodes)
    total = values("importance_sampling_ratio").sum()
    count = values("num_ratios").sum()
    is_of_sequences = mode.startswith("sequence")
    assert count == (len(episodes) - 1 if is_of_sequences else num_tokens)
    if is_of_sequences:  # for TRL, the sequence without a sampled token has the ratio 1
        total, count = total + 1, count + 1
    found = {
        f"{gap}/mean": values("sampling_logp_difference").sum() / num_tokens,
        f"{gap}/max": values("sampling_logp_difference_max").max(),
        f"{ratio}/mean": total / count,
        f"{ratio}/min": values("importance_sampling_ratio_min").min(),
        f"{ratio}/max": values("importance_sampling_ratio_max").max(),
    }
    expected = {name: metrics[name] for name in found}
    assert {n: float(value) for n, value in found.items()} == pytest.approx(expected, rel=TOLERANCE)


def test_with_the_correction_the_corrected_divergence_is_still_trls(
    episodes, tmp_path, reference_folder
):
    """Its factor is the ratio to the trainer's own policy before the step."""
    settings = corrected("grpo", "sequence_truncate", use_bias_correction_kl=True)
    loss, found, _ = trls(settings, (tmp_path, reference_folder), episodes, corrects=True)
    own, its_gradients, _ = ours(settings, episodes, 40, corrects=True)
    assert own == pytest.approx(loss, rel=TOLERANCE)
    assert largest_difference(its_gradients, found) < TOLERANCE


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages_are_trls(episodes, tmp_path, reference_folder, scale_rewards):
    """TRL's own function, from the rewards of its reward function on."""
    settings, folders = settings_of("dapo"), (tmp_path, reference_folder)
    trainer = make_trainer(settings, folders, episodes, scale_rewards=scale_rewards)
    expected = trainer._generate_and_score_completions([{"prompt": "a"}] * 12)["advantages"]
    rewards = torch.tensor(REWARDS)
    found = group_advantages(rewards, 4, scale_rewards, batch_std=float(rewards.std()))
    assert found.dtype == expected.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected.tolist(), rel=TOLERANCE, abs=1e-12)
    assert float(expected.abs().max()) > 1.0


def two_updates(settings, folders, episodes, rows, sampler):
    """TRL's whole `train` of two steps, and our two updates; how far these are from each other.

    Both keep the trainer's log-probabilities of before the first update for the second.
    """
    options = {"max_steps": 2, "lr_scheduler_type": "constant", "save_strategy": "no"}
    quiet = {"disable_tqdm": True, "logging_strategy": "no"}
    trainer = make_trainer(settings, folders, episodes, **options, **quiet)
    trainer.use_vllm = sampler == "vllm"
    trainer.train()

    module = TokenLogprobs(reference_model(), TEMPERATURE)
    reference = Reference(module)
    module.model.load_state_dict(new_model().state_dict())
    rollout = RolloutSettings(max_tokens=MAX_TOKENS, num_generations=4, sampler=sampler)
    config = Config(grpo=settings, rollout=rollout)
    updater = Updater(Accelerator(cpu=True), module, Ranks(0, 1, 60.0), config, reference=reference)
    advantages = group_advantages(torch.tensor(REWARDS), 4).tolist()
    updates = [
        updater.update_policy(rows, advantages, 1e-2, is_last=last) for last in (False, True)
    ]
    return updates, largest_difference(moved(module.model), moved(trainer.model))


UPDATES = {"num_iterations": 2, "max_grad_norm": 0.1, "learning_rate": 1e-2}


@pytest.mark.parametrize(
    ("loss_type", "level"),
    [
        pytest.param(
            *(loss_type, level),
            marks=() if loss_type in TELLING else pytest.mark.proof,
        )
        for loss_type in LOSS_TYPES
        for level in LEVELS
    ],
)
def test_two_iterations_on_stored_logprobs_are_two_steps_of_trls_training(
    episodes, tmp_path, reference_folder, loss_type, level
):
    """Rewards, advantages, stored log-probabilities, clipping, AdamW."""
    settings = settings_of(loss_type, level, "everything", **UPDATES)
    rows = [with_logprobs(row) for row, _ in episodes]
    folders = (tmp_path, reference_folder)
    (first, second), difference = two_updates(settings, folders, episodes, rows, "own")
    assert difference < 1e-6
    assert first["train/clip_ratio"] == 0.0 and first["train/sampling_logp_difference_max"] < 1e-12
    assert second["train/clip_ratio"] > 0.05 and second["train/sampling_logp_difference_max"] > 0.1
    sides = [second.get(f"clip_ratio/{at}_mean", 0.0) for at in ("low", "high", "region")]
    if loss_type != "cispo":  # settings.delta clips more tokens, and TRL does not count them
        assert 0 < sides[2] <= second["train/clip_ratio"]
        assert sides[2] == pytest.approx(sides[0] + sides[1])
    assert first["train/grad_norm"] > settings.max_grad_norm  # it is clipped


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_two_corrected_iterations_are_two_steps_of_trls_training(
    episodes, tmp_path, reference_folder, mode
):
    settings = corrected("dapo", mode, **UPDATES)
    rows, folders = [row for row, _ in episodes], (tmp_path, reference_folder)
    (first, second), difference = two_updates(settings, folders, episodes, rows, "vllm")
    assert difference < 1e-6
    assert first["train/clip_ratio"] == 0.0 and second["train/clip_ratio"] > 0.05
    low, high = CLIPS[mode.partition("_")[0]]
    of_correction = {name: value for name, value in first.items() if "sampling" in name}
    assert {name: second[name] for name in of_correction} == pytest.approx(of_correction, TOLERANCE)
    smallest = first["train/importance_sampling_ratio_min"]
    assert smallest == (low if mode.endswith("truncate") else 0.0)
    largest = first["train/importance_sampling_ratio_max"]
    assert largest == high if mode.endswith("truncate") else largest <= high


def moved(model):
    """How far training moved each parameter."""
    pairs = zip(model.parameters(), new_model().parameters(), strict=True)
    return [after.detach() - before.detach() for after, before in pairs]
