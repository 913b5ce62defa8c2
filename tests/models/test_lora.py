"""LoRA: what is trained, what the sampler sees of it, and what a checkpoint holds."""

import json
import shutil
from functools import partial

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    LagunaConfig,
    LagunaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.checkpoint import TrainState
from pipeline.checkpoints.run_folder import read_state
from pipeline.common import children
from pipeline.config.settings import ModelSettings
from pipeline.models import lora
from pipeline.models.loading import load_folder, load_model
from pipeline.models.sampling_copy import trained_weights
from pipeline.rollout.samplers.own import RowSampler
from scripts.proofs.grid import small_model
from tests.rollout.samplers.test_generate import play, recomputed
from tests.support.helpers import tokenizer
from tests.support.messages import refusal, says
from tests.support.trial import trial

IDS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]])
PLAIN = ModelSettings()
# Two computations that round at places of their own are as far from each other as each is from
# float32, or farther. Sampler and trainer round at the same places; attention alone sums in
# another order, and a sum near the middle of two bf16 numbers becomes the other one. Measured:
# .00 to .09 with the kernels of several processors, .88 to 1.2 with adapters in bf16 or merged.
SHARE_OF_ROUNDING = 0.25


def small(kind, config_class, **settings):
    """A model of another family in the shape of `small_model`."""
    shape = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return made(kind, config_class(**shape, **heads, **ends, **settings))


def gpt2():
    return made(GPT2LMHeadModel, GPT2Config(vocab_size=16, n_embd=32, n_layer=2, n_head=4))


@torch.no_grad()
def made(kind, config):
    """With all parameters random: fresh biases are zero, and fresh weights small."""
    model, generator = kind(config).eval(), torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "norm" not in name and ".ln_" not in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


FUSED = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "Qwen3, tied": partial(small_model, 4),
    "Llama, untied": partial(small, LlamaForCausalLM, LlamaConfig),
    "Llama, tied": partial(small, LlamaForCausalLM, LlamaConfig, tie_word_embeddings=True),
    "Mistral": partial(small, MistralForCausalLM, MistralConfig, sliding_window=None),
    "Qwen2, biases": partial(small, Qwen2ForCausalLM, Qwen2Config),
    "GPT-2, transposed weights": gpt2,
    "Qwen3-MoE, fused experts": partial(small, Qwen3MoeForCausalLM, Qwen3MoeConfig, **FUSED),
    "Mixtral, fused experts": partial(small, MixtralForCausalLM, MixtralConfig),
    "Laguna, shared experts": partial(small, LagunaForCausalLM, LagunaConfig, **FUSED),
}


def attached(model=None, seed=1, base="the/base", **settings):
    model = small_model(4) if model is None else model
    return lora.attach(model, ModelSettings(**settings), base, seed)


def moved(model, seed=5):
    """The model with adapters as training leaves them: none of them is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# What is trained


@pytest.mark.parametrize("kind", MODELS)
def test_only_adapters_are_trained_and_fresh_ones_change_no_bit(kind):
    before = logits(MODELS[kind]())
    model = attached(MODELS[kind]())
    assert torch.equal(logits(model), before)
    assert trained(model) and all(".lora_" in name for name in trained(model))
    assert all(".lora_" not in n for n, p in model.named_parameters() if not p.requires_grad)
    assert not torch.equal(logits(moved(model)), before)


def test_adapters_come_from_the_seed_alone():
    torch.manual_seed(0)
    first = trained(attached(seed=7))
    torch.manual_seed(1)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    again, other = trained(attached(seed=7)), trained(attached(seed=8))
    assert torch.equal(torch.rand(3), drawn), "the global generator is left as it was"
    assert all(torch.equal(p, again[name]) for name, p in first.items())
    differing = [name for name, p in first.items() if not torch.equal(p, other[name])]
    assert differing == [name for name in first if "lora_A" in name]  # B is zero


def test_rank_and_scale_are_those_of_the_settings():
    model = moved(attached(lora_r=4, lora_alpha=6))
    up = model.get_base_model().model.layers[1].mlp.up_proj
    a, b = up.lora_A["default"].weight, up.lora_B["default"].weight
    assert (a.shape, b.shape) == ((4, 32), (64, 4))
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    added = up(x) - up.base_layer(x)
    assert torch.allclose(added, 6 / 4 * x @ a.T @ b.T, atol=1e-6)
    assert float(added.detach().abs().max()) > 0.1


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (["all-linear"], 14),
        (["q_proj", "v_proj"], 4),
        (["mlp.up_proj"], 2),
        (["layers.1.self_attn.o_proj"], 1),
    ],
)
def test_adapters_sit_on_the_layers_that_are_named(targets, layers):
    names = [name for name in trained(attached(lora_target_modules=targets)) if "lora_A" in name]
    assert len(names) == layers
    assert targets == ["all-linear"] or all(any(f".{t}." in n for t in targets) for n in names)


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (["attention"], "attention"),
        (["q_proj", "w_proj"], "w_proj"),  # PEFT would take the first and forget the second
        (["q_proj", "all-linear"], "all-linear"),
        (["lm_head"], "lm_head"),
        (["q_proj", "embed_tokens"], "embed_tokens"),
        (["norm"], "norm"),
        (["self_attn"], "self_attn"),
    ],
)
def test_a_target_that_is_no_inner_linear_layer_is_refused(targets, named):
    says(
        refusal(attached, small_model(4), lora_target_modules=targets),
        f"lora_target_modules: got {named!r}",
        "q_proj",
        "all-linear by itself",
    )


@pytest.mark.parametrize("kind", [name for name in MODELS if "experts" in name])
def test_every_adapter_of_a_mixture_of_experts_gets_a_gradient(kind):
    model = moved(attached(MODELS[kind]()))
    parts = {name.rpartition(".lora_")[0].rpartition("layers.1.")[2] for name in trained(model)}
    assert {"mlp.experts", "mlp.experts.base_layer", "mlp.gate"} <= parts or "Laguna" in kind
    model(IDS).logits.log_softmax(-1)[..., 3].sum().backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in trained(model).values())


# What cannot be merged


REFUSED = {
    "Jamba reads the weight of a layer past its adapters": (
        partial(
            small,
            JambaForCausalLM,
            JambaConfig,
            attn_layer_offset=1,
            attn_layer_period=2,
            num_experts=2,
        ),
        ("got JambaForCausalLM", "dt_proj past its adapter", "set use_peft false"),
    ),
    "Phi-MoE has routers that are linear layers of two outputs": (
        partial(small, PhimoeForCausalLM, PhimoeConfig, num_local_experts=4),
        ("got PhimoeForCausalLM", "fails in a trial", "set use_peft false"),
    ),
    "PEFT refuses Mamba": (
        partial(small, MambaForCausalLM, MambaConfig),
        ("lora_target_modules: got all-linear", "MambaForCausalLM ([PEFT:"),
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_layers_whose_adapters_cannot_be_merged_are_refused(why):
    make, words = REFUSED[why]
    says(refusal(trial, make(), "--use-peft"), *words)


@pytest.mark.parametrize("kind", ["Qwen3-MoE, fused experts", "Mixtral, fused experts"])
def test_adapters_that_peft_adds_to_weights_in_bf16_are_refused(kind):
    message = refusal(lora.attach, MODELS[kind](), PLAIN, "", 1, torch.bfloat16)
    says(
        message,
        "lora_target_modules: got model.layers.0.mlp",
        "of the attention",
        "mixed_precision no",
    )
    narrow = ModelSettings(lora_target_modules=["q_proj"])
    lora.attach(MODELS[kind](), narrow, "", 1, torch.bfloat16)


# What the sampler sees


def gap_of(model, rows, temperature):
    """Between the sampler's log-probabilities and training's: maximum, mean, number of tokens."""
    found, sampled_N = recomputed(model, rows, temperature)
    gaps_N = (found - sampled_N).abs()
    return float(gaps_N.max()), float(gaps_N.mean()), len(gaps_N)


# These have no part that another one has not.
LIKE_OTHERS = ["Llama, untied", "Llama, tied", "Mistral", "Mixtral, fused experts"]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.proof if kind in LIKE_OTHERS else ()) for kind in MODELS],
)
def test_the_sampler_speaks_as_the_unmerged_model_whose_weights_stay(kind):
    model = attached(MODELS[kind]())
    sampler = RowSampler(model, 0, 0.8, torch.float32)
    moved(model)
    before = [p.clone() for p in model.parameters()]
    sampler.load_weights(trained_weights(model))
    rows = play(sampler, range(60), vocabulary=16)
    gap, _, count = gap_of(model, rows, 0.8)
    assert count > 400
    assert gap <= 1e-5
    with model.disable_adapter():
        assert gap_of(model, rows, 0.8)[0] > 0.1, "the adapters have no effect"
    sampler.load_weights(trained_weights(moved(model, seed=6)))  # from the base again, not on top
    assert gap_of(model, play(sampler, range(60), 16), 0.8)[0] <= 1e-5
    frozen = [p for p in model.parameters() if not p.requires_grad]
    kept = [b for b, p in zip(before, model.parameters(), strict=True) if not p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(frozen, kept, strict=True))


@pytest.mark.parametrize("kind", ["Qwen3, tied", "Qwen2, biases", "GPT-2, transposed weights"])
def test_in_bf16_trainer_and_sampler_share_the_base_and_multiply_by_the_fp32_adapters(kind):
    model = lora.attach(MODELS[kind](), PLAIN, "", 1, torch.bfloat16)
    sampler = RowSampler(model, 0, 1.0, torch.bfloat16)
    shared = {p.data_ptr() for p in model.parameters() if not p.requires_grad}
    own = [p for p in sampler.model.parameters() if p.data_ptr() not in shared]
    assert {p.dtype for p in own} == {torch.float32}
    sampler.load_weights(trained_weights(moved(model)))
    for mine, theirs in zip(own, trained(model).values(), strict=True):
        assert torch.equal(mine, theirs)
    products = set()
    for module in [*model.modules(), *sampler.model.modules()]:
        if isinstance(module, LoraLayer):
            for factor in (module.lora_A["default"], module.lora_B["default"]):
                factor.register_forward_hook(lambda _, x, y: products.update((x[0].dtype, y.dtype)))
    rows = play(sampler, range(60), vocabulary=16)
    with torch.autocast("cpu", torch.bfloat16):  # as Accelerate calls the module
        rounded, sampled_N = recomputed(model, rows)
    assert products == {torch.float32}
    exact, _ = recomputed(model.float(), rows)
    rounding = float((rounded - exact).abs().mean())
    assert len(rounded) > 400
    assert float((rounded - sampled_N).abs().mean()) <= SHARE_OF_ROUNDING * rounding
    assert 1e-3 < rounding < 1e-1


# What a checkpoint holds


KEPT = ["Qwen3, tied", "Qwen3-MoE, fused experts"]


def saved(kind, tmp_path):
    """A run's checkpoints: the base model, and a stage's adapters; and the model with these."""
    folder = tmp_path / "run" / "checkpoints"
    base = MODELS[kind]()
    checkpoint.save(folder, "warm-start", base, tokenizer(), TrainState().state_dict())
    model = moved(attached(base, base=str(folder / "warm-start"), lora_r=2))
    state = TrainState(stage="airline", step=4).state_dict()
    return model, checkpoint.save(folder, "stage-1-airline", model, tokenizer(), state)


@pytest.fixture(params=KEPT)
def run_folder(request, tmp_path):
    return saved(request.param, tmp_path)


def test_a_checkpoint_holds_adapters_alone_with_its_tokenizer(run_folder):
    model, path = run_folder
    assert not list(path.glob("model*")) and not list(path.glob("*.bin"))
    weights = load_file(path / "adapter_model.safetensors")
    assert weights and all(".lora_A." in name or ".lora_B." in name for name in weights)
    assert sum(w.numel() for w in weights.values()) == sum(
        p.numel() for p in trained(model).values()
    )
    whole = (path.parent / "warm-start" / "model.safetensors").stat().st_size
    assert (path / "adapter_model.safetensors").stat().st_size < whole / 2
    assert not (path / "README.md").exists()  # PEFT's form of a model card
    kept = json.loads((path / "adapter_config.json").read_text())
    assert kept["base_model_name_or_path"] == str(path.parent / "warm-start")
    assert (kept["r"], kept["lora_alpha"]) == (2, 32)
    assert AutoTokenizer.from_pretrained(path).chat_template == tokenizer().chat_template
    state = TrainState(stage="airline", step=4).state_dict()
    assert read_state(path).items() >= state.items()


def test_peft_transformers_and_the_pipeline_load_the_same_model_from_it(run_folder):
    model, path = run_folder
    base = AutoModelForCausalLM.from_pretrained(path.parent / "warm-start", dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, path).merge_and_unload()
    ours = load_folder(path, PLAIN)
    by_transformers = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for loaded in (merged, ours, by_transformers):
        assert torch.allclose(logits(loaded), logits(model), rtol=0, atol=1e-5)
    for mine, peft in zip(ours.parameters(), merged.parameters(), strict=True):
        assert torch.equal(mine, peft)
    rounded = load_folder(path, PLAIN, dtype=torch.bfloat16)  # added in fp32, and then rounded
    for mine, peft in zip(rounded.parameters(), merged.parameters(), strict=True):
        assert torch.equal(mine, peft.bfloat16())


def test_a_model_to_train_on_is_whole_and_takes_adapters_of_its_own(run_folder, tmp_path):
    model, path = run_folder
    started = load_model(ModelSettings(model=str(path)), tokenizer(), 0)
    again = attached(started)
    assert torch.equal(logits(again), logits(load_folder(path, PLAIN)))
    assert len(trained(again)) == len(trained(model))
    plain = checkpoint.save(
        tmp_path, "base", load_folder(path, PLAIN), tokenizer(), TrainState().state_dict()
    )
    assert not lora.is_adapter(plain)
    assert torch.allclose(logits(load_folder(plain, PLAIN)), logits(model), rtol=0, atol=1e-5)
    assert all(parameter.requires_grad for parameter in load_folder(path, PLAIN).parameters())


def test_adapters_of_a_run_that_was_moved_find_their_base(run_folder, tmp_path):
    model, path = run_folder
    assert lora.base_named_in(path) == str(path.parent / "warm-start")
    there = shutil.move(tmp_path / "run", tmp_path / "elsewhere") / "checkpoints" / path.name
    assert lora.base_named_in(there) == str(there.parent / "warm-start")
    assert torch.allclose(logits(load_folder(there, PLAIN)), logits(model), rtol=0, atol=1e-5)
    shutil.rmtree(there.parent / "warm-start")
    assert lora.base_named_in(there) == str(path.parent / "warm-start")
    message = refusal(load_folder, there, PLAIN)
    assert message.startswith(f"model: got '{path.parent / 'warm-start'}', but its model cannot be")


def test_a_hub_id_is_kept_and_a_missing_base_is_refused(tmp_path):
    for name, base in (("hub", "Qwen/Qwen3-4B"), ("none", None)):
        (tmp_path / name).mkdir()
        named = {"base_model_name_or_path": base}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(named))
    assert lora.base_named_in(tmp_path / "hub") == "Qwen/Qwen3-4B"
    says(
        refusal(lora.base_named_in, tmp_path / "none"),
        f"adapters in {tmp_path / 'none'}",
        "no base model",
        "enter it in adapter_config.json",
    )


LONG = "takes more than"
COSTLY = {  # what a file of adapters holds, after how much CPU time it is refused, and why
    "targets": ({"target_modules": "(.*.*)*x"}, 0.3, LONG),
    "ranks": ({"target_modules": "all-linear", "rank_pattern": {"((.+)+)+!": 2}}, 0.3, LONG),
    "layers": (
        {
            "target_modules": ["q_proj"],
            "layers_to_transform": [0],
            "layers_pattern": "((.+)+)+!",
        },
        *(0.3, LONG),
    ),
    "whole modules": ({"modules_to_save": ["((.+)+)+!"]}, 0.3, LONG),
    "copies of layers": ({"layer_replication": [[0, 1]] * 10**5}, 2.0, LONG),
    "huge ranks": ({"rank_pattern": {"q_proj": 10**9}}, 2.0, "asks for other adapters than"),
}


def changed(path, values):
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(("values", "seconds", "why"), COSTLY.values(), ids=COSTLY)
def test_a_file_that_takes_exponential_time_or_all_memory_is_refused(
    values, seconds, why, tmp_path, monkeypatch
):
    _, path = saved("Qwen3, tied", tmp_path)
    changed(path, values)
    monkeypatch.setattr(children, "MAX_CPU_S", seconds)
    says(refusal(load_folder, path, PLAIN), f"model: {path}: adapter_config.json {why}")


def test_expressions_of_a_usual_kind_load_the_same_model(tmp_path):
    model, path = saved("Qwen3, tied", tmp_path)
    usual = r".*\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"
    changed(path, {"target_modules": usual, "rank_pattern": {"q_proj": 2, r"^model\.x\..*": 4}})
    assert torch.allclose(logits(load_folder(path, PLAIN)), logits(model), rtol=0, atol=1e-5)
    changed(path, {"target_modules": "(unclosed"})
    says(refusal(load_folder, path, PLAIN), f"the adapters in {path} do not fit their base model")


@pytest.mark.parametrize("kind", [*KEPT, "Laguna, shared experts"])  # which PEFT 0.21 would lose
def test_adapters_come_back_bit_by_bit(kind, tmp_path):
    model, path = saved(kind, tmp_path)
    own = attached(load_folder(path.parent / "warm-start", PLAIN), lora_r=2)
    lora.load(own, path)
    for (name, mine), theirs in zip(trained(own).items(), trained(model).values(), strict=True):
        assert torch.equal(mine, theirs), name
    assert torch.equal(logits(own), logits(model))
    assert torch.allclose(logits(load_folder(path, PLAIN)), logits(model), rtol=0, atol=1e-5)


def test_adapters_of_other_layers_are_refused(tmp_path):
    _, path = saved("Qwen3, tied", tmp_path)
    own = attached(
        load_folder(path.parent / "warm-start", PLAIN), lora_r=2, lora_target_modules=["q_proj"]
    )
    before = {name: p.clone() for name, p in trained(own).items()}
    said = f"lora_target_modules: not those of the adapters in {path}; give its own"
    assert refusal(lora.load, own, path) == said
    assert all(torch.equal(p, before[name]) for name, p in trained(own).items())


@pytest.mark.parametrize(("name", "got", "held"), [("lora_r", 4, 2), ("lora_alpha", 64, 32)])
def test_adapters_of_another_size_or_scale_are_refused(tmp_path, name, got, held):
    _, path = saved("Qwen3, tied", tmp_path)
    settings = ModelSettings(**{"lora_r": 2, "lora_alpha": 32})
    lora.check_settings(path, settings)
    other = settings.model_copy(update={name: got})
    said = f"{name}: got {got}, but {path.name} holds adapters of {held}"
    assert refusal(lora.check_settings, path, other) == said
