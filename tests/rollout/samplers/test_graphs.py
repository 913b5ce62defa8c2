"""Decoding as on a GPU: what is said, addresses that graphs know, and steps that have no graph."""

from random import Random
from statistics import fmean

import pytest
import torch
import transformers

from pipeline.config.settings import ModelSettings, RolloutSettings
from pipeline.data.rng import stream_key
from pipeline.models import fused_layers
from pipeline.models.layers import keep_less
from pipeline.models.loading import load_folder
from pipeline.models.sampling_copy import trained_weights
from pipeline.rollout import rollout
from pipeline.rollout.rollout import RolloutRequest
from pipeline.rollout.samplers import graphs, own
from pipeline.rollout.samplers.own import RowSampler
from scripts.proofs.grid import small_model
from tests.models.test_lora import MODELS, attached, moved, small
from tests.support.helpers import chat, embedded, module_of, rollout_of
from tests.support.recorded_graphs import RecordedGraphs, storage
from tests.support.warm import play

FP32, BF16 = torch.float32, torch.bfloat16
END = 0


@pytest.fixture(autouse=True)
def one_thread():
    """More threads add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sampler_of(model, recorded=None, dtype=FP32, **options):
    sampler = RowSampler(model, END, 1.0, dtype, max_tokens=128, **options)
    if recorded is not None:
        sampler.decode_with(recorded)
        recorded.fixed = sampler.fixed
    return sampler


def talk(sampler, number=0, greedy=False, until=None):
    """The messages of ten or more conversations of two turns, of different lengths."""
    random = Random(number)
    count = 10 + number % 3
    prompts = [[random.randrange(1, 16) for _ in range(random.randint(1, 9))] for _ in range(count)]
    episodes = sampler.open(prompts, range(count))
    said = [[] for _ in episodes]
    for _ in range(2):
        waiting = {i: 3 + random.randrange(25) for i in range(count)}
        while waiting:
            asked = [episodes[i] for i in waiting]
            messages = sampler.sample(asked, [*waiting.values()], greedy, until)
            for i, message in zip([*waiting], messages, strict=True):
                if message is not None:
                    said[i].append(message)
                    del waiting[i]
        for episode in episodes:
            sampler.extend(episode, [random.randrange(1, 16) for _ in range(random.randint(1, 20))])
    for episode in episodes:
        sampler.close(episode)
    return [message for messages in said for message in messages]


def ids_of(said):
    return [message.ids for message in said]


def gap(one, other):
    """The largest difference of log-probabilities, in nats."""
    pairs = zip(one, other, strict=True)
    return max(abs(a - b) for x, y in pairs for a, b in zip(x.logprobs, y.logprobs, strict=True))


# What is said


def gemma():
    options = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3TextConfig
    return small(transformers.Gemma3ForCausalLM, config, head_dim=8, **options)


def after_training():
    """A model whose layers keep less for a backward pass."""
    model = MODELS["Llama, tied"]()
    keep_less(model)
    return model


FAMILIES = {**MODELS, "Gemma3": gemma, "Llama, after training": after_training}


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "LoRA"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_says_the_same_as_without_graphs(kind, adapted):
    model = moved(attached(FAMILIES[kind]())) if adapted else FAMILIES[kind]()
    recorded = RecordedGraphs()
    expected = talk(sampler_of(model))
    said = talk(sampler_of(model, recorded))
    assert ids_of(said) == ids_of(expected)
    assert gap(said, expected) < 1e-5
    assert recorded.num_captures > 0
    assert recorded.num_replays > 20


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"top_p": 0.8}, {"top_k": 5, "top_p": 0.9}, {"greedy": True}, {}]
)
@pytest.mark.parametrize("until", [None, 3])
def test_no_way_to_draw_and_no_share_of_messages_changes_what_is_said(options, until):
    greedy = options.pop("greedy", False)
    plain, other = (
        sampler_of(small_model(), recorded, **options) for recorded in (None, RecordedGraphs())
    )
    assert ids_of(talk(other, 1, greedy, until)) == ids_of(talk(plain, 1, greedy))


def test_in_bf16_fused_layers_round_as_the_models_own():
    plain, other = (sampler_of(small_model(), r, BF16) for r in (None, RecordedGraphs()))
    text = [1 + i % 15 for i in range(100)]
    assert torch.equal(plain.logprobs(text), other.logprobs(text))


@pytest.mark.proof
def test_whole_rollouts_of_a_trained_model_are_the_same_in_few_passes(tmp_path, monkeypatch):
    """96 episodes of the three domains, of some three turns each."""
    warm_start = ["--warm-start-steps", "200", "--max-steps", "3", "--eval-tasks-per-domain", "1"]
    play("--output-dir", "out", *warm_start, "--report-to", "none", cwd=tmp_path, num_ranks=1)
    model = load_folder(str(tmp_path / "out" / "checkpoints" / "warm-start"), ModelSettings())
    limits = RolloutSettings()
    names = ("airline", "retail", "telecom")
    tasks = [t for n in names for t in module_of(n).generate_tasks(0, 4, "train", "medium")]
    asked = [
        RolloutRequest(task=task, trial=k, key=stream_key(task.key, k))
        for task in tasks
        for k in range(8)
    ]

    def played(recorded):
        end = chat().end_of_turn_id
        sampler = RowSampler(model, end, 1.0, FP32, max_tokens=limits.max_tokens)
        if recorded is not None:
            sampler.decode_with(recorded)
            monkeypatch.setattr(rollout, "on_gpu", lambda: True)
        lengths = []
        forward = sampler._forward
        monkeypatch.setattr(
            sampler, "_forward", lambda *given: lengths.append(given[1].shape[1]) or forward(*given)
        )
        episodes = rollout_of(sampler, chat(), embedded(*names), limits)(asked)
        return episodes, sum(length > 1 for length in lengths)

    expected, _ = played(None)
    found, passes = played(RecordedGraphs())
    assert fmean(episode.num_turns for episode in expected) > 2.5
    assert [episode.ids for episode in found] == [episode.ids for episode in expected]
    assert gap(found, expected) < 1e-5
    assert passes <= 10


# Addresses


def addresses(sampler):
    """Of the cache and the weights, and of the buffers of each number of rows."""
    buffers = sampler._blocks._buffers.items()
    tensors = {rows: filter(torch.is_tensor, vars(b).values()) for rows, b in buffers}
    tensors[0] = sampler.fixed()
    return {rows: [tensor.data_ptr() for tensor in of] for rows, of in tensors.items()}


@pytest.mark.parametrize("num_steps", [8, pytest.param(50, marks=pytest.mark.proof)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "LoRA"])
def test_weights_change_in_place_and_every_graph_stays_right(adapted, dtype, num_steps):
    def model(seed):
        return moved(attached(small_model(4)), seed) if adapted else small_model(seed)

    recorded = RecordedGraphs()
    trained = model(0)
    sampler = sampler_of(trained, recorded, dtype)
    for number in range(3):  # batches of all sizes
        talk(sampler, number)
    known = addresses(sampler)
    weights = dict(trained_weights(trained))
    loads = [num_steps // 4, num_steps // 2, num_steps - 2]
    for step in range(1, num_steps + 1):
        if step in loads:
            for name, weight in trained_weights(model(step)):  # as an update does
                weights[name].copy_(weight)
            sampler.load_weights(trained_weights(trained))
        said = talk(sampler, step % 3)
        if step in (1, *loads, num_steps):
            assert ids_of(said) == ids_of(
                talk(sampler_of(trained, RecordedGraphs(), dtype), step % 3)
            )
    assert known.items() <= addresses(sampler).items()
    assert recorded.num_captures == len(sampler._blocks._replays), "none was captured again"


def test_a_base_that_is_shared_takes_no_memory_twice():
    """Before adapters are attached, the base is the trainer's, in the sampler's type."""
    model = small_model().to(BF16)
    sampler = sampler_of(model, RecordedGraphs(), BF16)
    shared = {weight.data_ptr() for weight in model.parameters()}
    assert {weight.data_ptr() for weight in sampler.model.parameters()} == shared


def test_a_graph_reads_only_what_the_sampler_keeps():
    recorded = RecordedGraphs()
    sampler = sampler_of(small_model(), recorded)
    talk(sampler)
    buffers = sampler._blocks._buffers.values()
    kept = [*sampler.fixed(), *(x for b in buffers for x in vars(b).values() if torch.is_tensor(x))]
    assert {storage(x) for x in recorded.inputs} <= {storage(x) for x in kept}


def test_a_weight_that_moves_is_captured_again(monkeypatch):
    model = small_model()
    recorded = RecordedGraphs()
    sampler = sampler_of(model, recorded)
    talk(sampler)
    captures = recorded.num_captures
    weight = sampler.model.get_input_embeddings().weight
    weight.data = weight.data.clone()
    assert ids_of(talk(sampler)) == ids_of(talk(sampler_of(model)))
    assert recorded.num_captures == 2 * captures
    weight.data = weight.data.clone()
    monkeypatch.setattr(graphs.BlockDecoder, "_forget_if_moved", lambda _: None)
    with pytest.raises(RuntimeError, match="has moved"):
        talk(sampler)


# Steps without a graph


class ReadsData(torch.nn.SiLU):
    def forward(self, x):
        x.sum().item()
        return super().forward(x)


class MakesATensor(torch.nn.SiLU):
    def forward(self, x):
        return super().forward(x) + torch.tensor(0.0)


@pytest.mark.parametrize("spoiled", [ReadsData, MakesATensor])
def test_a_step_that_cannot_be_captured_says_so_and_decodes_as_before(spoiled, capsys):
    model = MODELS["Llama, tied"]()
    for layer in model.model.layers:
        layer.mlp.act_fn = spoiled()
    recorded = RecordedGraphs()
    said = talk(sampler_of(model, recorded))
    assert ids_of(said) == ids_of(talk(sampler_of(model)))
    assert recorded.num_replays == 0
    assert capsys.readouterr().err.count("warning: sampling without CUDA graphs") == 1


class WrongGraphs(RecordedGraphs):
    """Graphs that freeze the number of the step, as if it was the host's."""

    def capture(self, function):
        replay = super().capture(function)
        step = next(x for x in self.inputs if x.shape == (1,) and x.dtype == torch.int64)

        def wrong():
            step.zero_()
            replay()

        return wrong


def test_a_graph_that_computes_something_else_is_not_used(capsys):
    model = small_model()
    said = talk(sampler_of(model, WrongGraphs()))
    assert ids_of(said) == ids_of(talk(sampler_of(model)))
    assert "samples other tokens than the model; not used" in capsys.readouterr().err


def turned_backwards(x):
    return x.flip(-1)


def of_another_shape(x):
    return x[..., :3]


@pytest.mark.parametrize("factors", [turned_backwards, of_another_shape])
def test_fused_layers_that_compute_something_else_are_not_used(factors, monkeypatch, capsys):
    """As in a family with the code of Llama's attention, and another rotation."""

    def spoiled(*arguments, **named):
        return tuple(map(factors, right(*arguments, **named)))

    right = fused_layers._factors
    monkeypatch.setattr(fused_layers, "_factors", spoiled)
    model = small_model()
    sampler = sampler_of(model, RecordedGraphs())
    assert not any("forward" in vars(module) for module in sampler.model.model.modules())
    assert not sampler._cache.layers, "the cache of the comparison is gone"
    assert "warning: sampling without fused layers" in capsys.readouterr().err
    assert ids_of(talk(sampler)) == ids_of(talk(sampler_of(model)))


class NoMemory(RecordedGraphs):
    def capture(self, function):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_memory_that_runs_out_in_a_capture_is_told_and_everything_is_freed():
    sampler = sampler_of(small_model(), NoMemory())
    episodes = sampler.open([[1, 2, 3 + n] for n in range(9)], range(9))
    with pytest.raises(torch.OutOfMemoryError):
        sampler.sample(episodes, [9] * 9)
    for episode in episodes:
        sampler.close(episode)
    assert sampler._cache.num_bytes == 0
    sampler.open([[1, 2, 3]], [0])
    assert sampler._cache.layers[0].keys.shape[0] == 4, "rows for one episode alone"


def test_a_small_cache_stays_for_the_graphs_and_a_large_one_makes_room(monkeypatch):
    recorded = RecordedGraphs()
    sampler = sampler_of(small_model(), recorded)
    said = talk(sampler)
    captures = recorded.num_captures
    talk(sampler)
    assert recorded.num_captures == captures
    monkeypatch.setattr(own, "KEPT", 0.0)
    assert ids_of(talk(sampler)) == ids_of(said)
    assert sampler._cache.num_bytes == 0
    assert ids_of(talk(sampler)) == ids_of(said)
    assert recorded.num_captures == 2 * captures
