"""VLLMSampler on a stand-in for vLLM; `scripts/proofs/vllm.py` plays the same on vLLM itself."""

import json
import os
import re
import sys
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from pipeline.common.errors import EngineError, RunError, UserError
from pipeline.config.settings import SAMPLERS, ModelSettings, RolloutSettings
from pipeline.distributed.connect import be_deterministic
from pipeline.models import lora
from pipeline.models.sampling_copy import trained_weights
from pipeline.models.tiny import tiny_model
from pipeline.rollout.samplers import vllm as vllm_sampler
from pipeline.rollout.samplers.choice import make_sampler
from pipeline.rollout.samplers.vllm import VLLMSampler
from pipeline.training.learner import WeightProbe
from pipeline.training.token_logprobs import TokenLogprobs
from tests.support import ROOT
from tests.support.helpers import chat, tokenizer
from tests.support.messages import refusal, says
from tests.support.trial import trial
from tests.support.warm import play

STAND_IN = str(ROOT / "tests" / "support" / "vllm_stand_in")
PROMPT = [5, 9, 2, 40, 7]
EOS = 1


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """The stand-in in place of vLLM, which no later test sees."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(STAND_IN)
    import vllm

    yield vllm
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def settings(**given):
    return RolloutSettings.model_validate({"sampler": "vllm", "max_tokens": 96, **given})


def made(use_peft=False, tied=True, stops=(EOS,), **given):
    model = tiny_model(tokenizer(), 1)
    if not tied:
        model.config.tie_word_embeddings = False
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    if use_peft:
        model = lora.attach(model, ModelSettings(lora_r=4, lora_alpha=16), "base", 1)
    sampler = VLLMSampler(model, settings(**given), torch.float32, stops)
    sampler.load_weights(trained_weights(model))
    return model, sampler


@torch.no_grad()
def moved(model, seed=5, by=0.05):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += by * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def of_model(model, prompt, ids, temperature=1.0):
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def message(sampler, key, room=12, prompt=PROMPT, num_drawn=0, **given):
    (conversation,) = sampler.open([prompt], [key], [num_drawn])
    (said,) = sampler.sample([conversation], [room], **given)
    sampler.close(conversation)
    return said


# Draws


def test_a_message_is_drawn_alone_as_beside_others_and_with_the_models_log_probabilities():
    model, sampler = made(temperature=0.8)
    alone = [message(sampler, key) for key in range(6)]
    conversations = sampler.open([PROMPT] * 6, list(range(6)))
    beside = sampler.sample(conversations, [12] * 6)
    assert [m.ids for m in beside] == [m.ids for m in alone]
    assert len({tuple(m.ids) for m in alone}) == 6
    for said in alone:
        expected = of_model(model, PROMPT, said.ids, 0.8)
        assert torch.allclose(torch.tensor(said.logprobs), expected, atol=1e-5)


def test_a_call_returns_when_enough_messages_are_complete_and_the_next_goes_on():
    _, sampler = made()
    keys = [1, 2, 3, 4]
    whole = [message(sampler, key, room) for key, room in zip(keys, (3, 9, 6, 12), strict=True)]
    conversations = sampler.open([PROMPT] * 4, keys)
    rooms = [3, 9, 6, 12]
    said = sampler.sample(conversations, rooms, until=2)
    assert [one is not None for one in said] == [True, False, True, False]
    left = [conversations[1], conversations[3]]
    rest = sampler.sample(left, [9, 12])
    assert [said[0].ids, rest[0].ids, said[2].ids, rest[1].ids] == [one.ids for one in whole]


def test_each_of_several_ends_finishes_a_message_and_a_cut_one_is_not_finished():
    stops = (EOS, *range(100, 160))
    _, sampler = made(stops=stops, temperature=3.0)
    said = [message(sampler, key, 20) for key in range(12)]
    whole = [one for one in said if one.finished]
    assert 0 < len(whole) < len(said) and len({one.ids[-1] for one in whole}) > 1
    for one in said:
        assert (one.ids[-1] in stops) == one.finished
        assert one.finished or len(one.ids) == 20
        assert not any(token in stops for token in one.ids[:-1])


FEWER = [
    {"top_p": 0.6},
    {"top_k": 3},
    {"top_p": 0.9, "top_k": 20, "temperature": 1.7},
    {"top_k": 1},
]
FEWER += [{"top_p": 0.95, "temperature": 0.4}, {"temperature": 2.5}]


@pytest.mark.parametrize(
    ("given", "greedy"), [*((of, False) for of in FEWER), (FEWER[2], True)], ids=str
)
def test_log_probabilities_are_of_all_tokens_whatever_top_k_and_top_p_leave(given, greedy):
    model, sampler = made(**given)
    sampler.logprobs(PROMPT)  # which are at temperature 1
    others = [settings(sampler=name, **given) for name in ("own", "generate")]
    made_too = [make_sampler(model, chat(), of, torch.float32, False) for of in others]
    for key, one in product(range(4), [sampler, *made_too]):
        said = message(one, key, greedy=greedy)
        expected = of_model(model, PROMPT, said.ids, given.get("temperature", 1.0))
        assert torch.allclose(torch.tensor(said.logprobs), expected, atol=1e-5)


# Weights


def checked(model, sampler):
    probe = WeightProbe(chat(), torch.float32)
    check = partial(probe.check, sampler, TokenLogprobs(model, 1.0), Accelerator(), "step 3")
    check()
    return check


@pytest.mark.parametrize("tied", [True, False])
def test_new_weights_arrive_tied_or_not(tied):
    model, sampler = made(tied=tied)
    check = checked(model, sampler)
    moved(model)
    with pytest.raises(RunError, match="did not get all weights"):
        check()
    sampler.load_weights(trained_weights(model))
    check()
    said = message(sampler, 1)
    expected = of_model(model, PROMPT, said.ids)
    assert torch.allclose(torch.tensor(said.logprobs), expected, atol=1e-4)


def test_adapters_arrive_without_their_base_and_are_scaled_once(vllm):
    model, sampler = made(use_peft=True)
    check = checked(model, sampler)
    for seed, by in enumerate((0.05, 1e-3)):
        moved(model, seed, by)
        before = {name: tensor.clone() for name, tensor in trained_weights(model)}
        sampler.load_weights(trained_weights(model))
        check()
        assert all(torch.equal(before[name], tensor) for name, tensor in trained_weights(model))
        said = message(sampler, seed)
        expected = of_model(model, PROMPT, said.ids)
        assert torch.allclose(torch.tensor(said.logprobs), expected, atol=1e-4)
    (engine,) = vllm.ENGINES[-1:]
    assert len(engine.adapters) == 1
    assert engine.arguments.max_lora_rank == 8


@pytest.mark.parametrize("use_peft", [False, True], ids=["whole", "adapters"])
def test_on_a_gpu_the_engine_sleeps_while_the_update_runs(vllm, use_peft, monkeypatch):
    model, sampler = made(use_peft=use_peft)
    monkeypatch.setattr(sampler, "_is_on_cpu", False)
    check = checked(model, sampler)
    (engine,) = vllm.ENGINES[-1:]
    for seed in range(2):
        sampler.rest()
        sampler.rest()  # as in a step of several updates
        assert engine.asleep == {"weights", "kv_cache"}
        moved(model, seed)
        sampler.load_weights(trained_weights(model))
        assert not engine.asleep
        check()


@pytest.mark.parametrize("kind", [Qwen3MoeConfig, MixtralConfig])
def test_experts_travel_with_the_names_of_a_models_files_and_not_on_a_cpu(kind, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    experts = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_config(kind(vocab_size=99, **sizes, **heads, **experts))
    model.save_pretrained(tmp_path)
    kept = load_file(tmp_path / "model.safetensors")
    sent = dict(vllm_sampler.as_in_files(model, trained_weights(model)))
    assert {name for name in kept if ".experts.3." in name} and sent.keys() == kept.keys()
    assert all(sent[name].equal(tensor) for name, tensor in kept.items())
    says(
        refusal(VLLMSampler, model, settings(), torch.float32, [EOS]),
        "vllm, which on CPUs keeps the first weights of experts",
    )


# What it refuses


def refused(**given):
    model = tiny_model(tokenizer(), 1)
    return refusal(make_sampler, model, chat(), settings(**given), torch.float32, False)


def test_what_does_not_serve_is_one_line(vllm, monkeypatch):
    for version in ("0.9.1", "0.33.0"):
        with monkeypatch.context() as patch:
            patch.setattr(vllm, "__version__", version)
            says(refused(), f"sampler: got vLLM {version}; install 0.32 or later, below 0.33")
    with monkeypatch.context() as patch:
        patch.setattr(vllm.ModelRegistry, "get_supported_archs", lambda: {"GPT9"})
        says(refused(), "got vllm, which does not know Qwen3ForCausalLM; set own")
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "FAULTS", ["memory"])
        says(refused(vllm_memory=0.2), "vLLM does not start", "change vllm_memory, now 0.2")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]  # for good: monkeypatch would bring them back after the fixture
    monkeypatch.setitem(sys.modules, "vllm", None)
    says(refused(), "got vllm, which is not installed; pip install 'three-domain-grpo[vllm]'")


@pytest.mark.parametrize(("fault", "why"), [("step", "EngineDeadError"), ("abort", "'abort'")])
def test_an_engine_that_fails_ends_the_run_by_name(vllm, monkeypatch, fault, why):
    _, sampler = made()
    monkeypatch.setattr(vllm, "FAULTS", [fault])
    with pytest.raises(RunError, match=why):
        message(sampler, 1)


def change(reply, **changes):
    """Change a whole message of the engine, not its answer to `logprobs`."""
    (completion,) = reply.outputs
    if reply.finished and reply.prompt_logprobs is None:
        for name, value in changes.items():
            of = reply if hasattr(reply, name) else completion
            setattr(of, name, value(getattr(of, name)))


OTHER_FORM = "replied in another form: [^\\n]+"
SAMPLED = "sampled {} tokens, and 1 to 12 were asked"
OUTSIDE = "sampled the token {}, and the vocabulary ends at [0-9]+"


def of_token(token):
    """A reply of this token alone, with a log-probability."""
    logprob = SimpleNamespace(logprob=-0.5)
    return {"token_ids": lambda x: [token], "logprobs": lambda x: [{token: logprob}]}


def repeated(times):
    return {name: lambda x: (x * 13)[:times] for name in ("token_ids", "logprobs")}


WRONG = {  # what changes in a reply, and what is told
    "no log-probabilities": ({"logprobs": lambda x: None}, OTHER_FORM),
    "too few log-probabilities": ({"logprobs": lambda x: x[1:]}, OTHER_FORM),
    "those of other tokens": (
        {"logprobs": lambda x: [{-5: of[next(iter(of))]} for of in x]},
        OTHER_FORM,
    ),
    "numbers": ({"logprobs": lambda x: [-0.5 for _ in x]}, OTHER_FORM),
    "no number": (
        {"logprobs": lambda x: [{t: SimpleNamespace(logprob=None) for t in of} for of in x]},
        OTHER_FORM,
    ),
    "tokens as text": ({"token_ids": lambda x: [str(token) for token in x]}, OTHER_FORM),
    "tokens as floats": ({"token_ids": lambda x: [float(token) for token in x]}, OTHER_FORM),
    "two messages": ({"outputs": lambda x: x * 2}, OTHER_FORM),
    "another request": ({"request_id": lambda x: "of another"}, OTHER_FORM),
    "no prompt": ({"prompt_token_ids": lambda x: None}, OTHER_FORM),
    "no tokens": (repeated(0), SAMPLED.format(0)),
    "too many tokens": (repeated(13), SAMPLED.format(13)),
    "a token below the vocabulary": (of_token(-1), OUTSIDE.format(-1)),
    "a token above the vocabulary": (of_token(100_000), OUTSIDE.format(100_000)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_reply_that_no_engine_gives_ends_the_run_by_name(vllm, monkeypatch, what):
    _, sampler = made()
    changes, why = WRONG[what]
    monkeypatch.setattr(vllm, "REPLIES", [partial(change, **changes)])
    (conversation,) = sampler.open([PROMPT], [1])
    with pytest.raises(EngineError, match=rf"^vLLM('s engine)? {why}$"):
        sampler.sample([conversation], [12])
    with suppress(EngineError):
        sampler.close(conversation)  # as a run does that ends


CALLS = {"add_request": [], "add_lora": ["--use-peft"], "collective_rpc": []}


@pytest.mark.parametrize("call", CALLS)
def test_at_the_start_an_engine_that_fails_is_named_and_not_the_model(vllm, monkeypatch, call):
    def fails(*_, **__):
        raise ValueError("no room\nfor this")

    monkeypatch.setattr(vllm.LLMEngine, call, fails)
    with pytest.raises(EngineError, match=r"^vLLM's engine failed: no room$"):
        trial(tiny_model(tokenizer(), 1), "--sampler", "vllm", *CALLS[call])


def test_at_the_start_sampler_and_training_agree_with_top_p_and_another_gap_names_the_sampler(
    vllm, monkeypatch
):
    flags = ["--sampler", "vllm", "--top-p", "0.6", "--top-k", "40", "--temperature", "1.5"]
    trial(tiny_model(tokenizer(), 1), *flags)
    far = {
        "logprobs": lambda x: [{t: vllm.Logprob(v.logprob - 1) for t, v in o.items()} for o in x]
    }
    monkeypatch.setattr(vllm, "REPLIES", [partial(change, **far)])
    says(
        refusal(trial, tiny_model(tokenizer(), 1), *flags),
        "differ by 1 nats ",
        " or set sampler own or use another",
    )


@pytest.mark.parametrize(
    ("sampler", "capability", "why"),
    [
        ("vllm", (9, 0), None),
        (
            "vllm",
            (7, 5),
            "deterministic: vLLM needs GPUs of compute capability 8.0 or more; got T4",
        ),
        ("own", (9, 0), "deterministic: works on CPU ranks, or with sampler vllm"),
    ],
)
def test_a_deterministic_run_on_gpus_asks_vllm_for_batch_invariance(
    sampler, capability, why, monkeypatch
):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    with pytest.raises(UserError, match=why) if why else nullcontext():
        be_deterministic(SAMPLERS[sampler], torch.device("cuda"))
    assert os.environ["VLLM_BATCH_INVARIANT"] == ("0" if why else "1")


def test_other_samplers_are_chosen_by_name(capsys):
    model = tiny_model(tokenizer(), 1)
    named = {
        name: make_sampler(model, chat(), settings(sampler=name), torch.float32, True)
        for name in ("auto", "own", "generate")
    }
    assert [type(sampler).__name__ for sampler in named.values()] == [
        *("RowSampler", "RowSampler", "GenerateSampler")
    ]
    assert "the setting sampler asks for it" in capsys.readouterr().err


# Whole runs

RUN = [
    *("--domains", "airline", "--tasks-per-domain", "8", "--tasks-per-step", "2"),
    *("--num-generations", "2", "--max-turns", "5", "--max-tokens-per-turn", "12"),
    *("--eval-tasks-per-domain", "1", "--eval-trials", "1", "--validation-steps", "0"),
    *("--warm-start-steps", "2", "--warm-start-batch-size", "2", "--max-steps", "2"),
    *("--report-to", "none", "--no-drop-zero-std-groups", "--save-steps", "1"),
    *("--sampler", "vllm", "--vllm-memory", "0.1", "--output-dir", "out", "--deterministic"),
    *("--top-p", "0.9", "--temperature", "1.2"),
]


def records(folder):
    return list(map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines()))


def play_beside_the_stand_in(*arguments, folder, **given):
    folder.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (folder / "vllm").symlink_to(f"{STAND_IN}/vllm")  # ranks import from this folder
    return play(*arguments, cwd=folder, **given)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], marks=pytest.mark.proof),
        ["--use-peft"],
        ["--partial-rollout-tokens", "5", "--max-steps", "3"],
    ],
    ids=["whole", "adapters", "partial"],
)
@pytest.mark.whole_run
def test_an_engine_that_fails_is_named_and_ranks_and_the_resume_change_no_draw(flags, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    play_beside_the_stand_in(*RUN, *flags, folder=one, num_ranks=1)
    found = records(one)
    steps = [line for line in found if line["kind"] == "train"]
    if "--partial-rollout-tokens" in flags:
        assert steps[2]["rollout/staleness/1"] > 0 < steps[2]["train/grad_norm"]
    else:
        assert [line["step"] for line in steps] == [1, 2]
        assert all(line["train/grad_norm"] > 0 for line in steps)
        assert all(line["train/sampling_logp_difference_max"] < 1e-4 for line in steps)

    two.mkdir()
    (two / "trouble").touch()
    said = play_beside_the_stand_in(*RUN, *flags, folder=two, code=1).stderr
    why = r"error: vLLM's engine failed: EngineDeadError: the engine is gone \(rank 1 on \S+, "
    assert re.search(rf"^{why}in sample airline step 2\)$", said, re.MULTILINE)
    (two / "trouble").unlink()
    resume = ("--output-dir", "out", "--resume-from-checkpoint", "step-000001")
    play_beside_the_stand_in(*resume, folder=two)
    assert found == records(two)
