"""Playing episodes: what the policy says reaches the environment, and what comes back reaches
the policy.
"""

import json
from types import SimpleNamespace

import pytest
import torch

from pipeline.config.settings import SAMPLERS, ModelSettings, RolloutSettings
from pipeline.data.rng import stream_key
from pipeline.models.capabilities import other_stops
from pipeline.models.chat.template import Chat
from pipeline.models.loading import load_folder, load_model, load_tokenizer
from pipeline.models.tiny import tiny_model, tiny_tokenizer
from pipeline.rollout.rollout import RolloutRequest
from pipeline.rollout.samplers.choice import make_sampler
from pipeline.rollout.samplers.own import RowSampler
from pipeline.rollout.trajectory import StopReason
from tests.support.helpers import (
    Desk,
    call,
    chat,
    embedded,
    make_task,
    module_of,
    played,
    rollout_of,
    say,
    tokenizer,
)
from tests.support.messages import refusal, says

LIMITS = RolloutSettings(
    max_turns=6, max_tokens_per_turn=100, max_tokens=800, max_tool_result_tokens=120
)
MALFORMED = say('<tool_call>\n{"name": "look"\n</tool_call>')


def play(*messages, limits=LIMITS, environment=Desk, **payload):
    task = make_task(payload=json.dumps(payload))
    trajectories, _ = played([messages], {"desk": environment}, limits, [task])
    return trajectories[0]


def results(trajectory):
    """What the policy was answered, in order."""
    return [m["content"] for m in trajectory.messages if m["role"] == "tool"]


def error(text):
    return json.dumps({"error": text})


# Tokens


def test_what_reset_returns_is_appended_to_the_request():
    trajectory = play(say("done"), addition=" from the night shift")
    assert trajectory.messages[1] == {"role": "user", "content": "hello from the night shift"}
    assert "hello from the night shift<|im_end|>" in tokenizer().decode(trajectory.prompt_ids)


# The ends of messages

END, OTHER_END = (tokenizer().convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>"))


def model_folder(folder, eos_token_id):
    """A folder whose generation config lists these ends; returns its settings."""
    tiny_model(tokenizer(), seed=1).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    path = folder / "generation_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**values, "eos_token_id": eos_token_id}), encoding="utf-8")
    return ModelSettings(model=str(folder))


def test_every_end_that_a_models_files_list_ends_its_messages(tmp_path, capsys, monkeypatch):
    settings = model_folder(tmp_path, [OTHER_END, END, 1_000_000])
    own = Chat(load_tokenizer(settings))
    model = load_model(settings, own.tokenizer, seed=1)
    forced = SAMPLERS["own"]._replace(target="scripts.proofs.runs:ForcedSampler.of_settings")
    monkeypatch.setitem(SAMPLERS, "own", forced)
    sampler = make_sampler(model, own, LIMITS, torch.float32, is_main=True)
    told = "messages end at <|im_end|>, and by the model's files at '<|endoftext|>'\n"
    assert capsys.readouterr().out == told
    script = [call("look", item="lamp"), say("all done")]
    said = [[own.message_ids(message) for message in script] for _ in range(2)]
    said[0][0][-1] = said[0][1][-1] = OTHER_END
    sampler.forced = {key: [token for ids in said[key] for token in ids] for key in range(2)}
    tasks = [make_task(f"t{number}") for number in range(2)]
    requests = [RolloutRequest(task=task, trial=0, key=key) for key, task in enumerate(tasks)]
    stopped, plain = rollout_of(sampler, own, {"desk": Desk}, LIMITS)(requests)

    result = {"role": "tool", "name": "look", "content": '{"lamp": "seen "}'}
    reply = own.reply_ids([result])  # follows the end that was sampled, whichever it is
    for trajectory, (first, last) in ((stopped, said[0]), (plain, said[1])):
        assert trajectory.completion_ids == first + reply + last
        sizes = (len(first), len(reply), len(last))
        assert trajectory.loss_mask == [n != 1 for n in range(3) for _ in range(sizes[n])]
        assert (trajectory.stop_reason, trajectory.reward) == (StopReason.COMPLETED, 0.5)
    assert plain.messages[2:] == [script[0], result, script[1]]
    by = {"stopped_by": "<|endoftext|>"}
    assert stopped.messages[2:] == [{**script[0], **by}, result, {**script[1], **by}]


def test_the_ends_of_messages_outlive_a_checkpoint(tmp_path):
    settings = model_folder(tmp_path, [END, OTHER_END])
    model = load_folder(tmp_path, settings)
    model.save_pretrained(tmp_path / "checkpoint")
    again = load_folder(tmp_path / "checkpoint", settings)
    assert other_stops(model, chat()) == other_stops(again, chat()) == [OTHER_END]


def test_the_tokenizers_end_of_sequence_ends_messages_too():
    made = tiny_tokenizer()
    made.eos_token = "<|endoftext|>"
    assert other_stops(tiny_model(tokenizer(), seed=1), Chat(made)) == [OTHER_END]
    assert other_stops(tiny_model(tokenizer(), seed=1), chat()) == []


@pytest.mark.parametrize("listed", ["</s>", [2, "</s>"], True, {"a": 1}])
def test_ends_that_are_no_ids_are_refused_in_one_line(tmp_path, listed):
    model = load_folder(tmp_path, model_folder(tmp_path, listed))
    says(refusal(make_sampler, model, chat(), LIMITS, torch.float32, False), "generation config")


# Stop reasons


@pytest.mark.parametrize(
    ("messages", "limits", "reason", "num_results"),
    [
        ([call("look", item="lamp")] * 3, {"max_turns": 3}, StopReason.MAX_TURNS, 3),
        ([say("done done done")], {"max_tokens_per_turn": 4}, StopReason.MAX_TOKENS, 0),
        ([MALFORMED], {"max_malformed_calls": 0}, StopReason.MALFORMED_CALL, 1),
    ],
)
def test_a_limit_ends_an_episode_after_its_last_message(messages, limits, reason, num_results):
    trajectory = play(*messages, limits=LIMITS.model_copy(update=limits))
    assert (trajectory.stop_reason, trajectory.num_turns) == (reason, len(messages))
    assert trajectory.loss_mask[-1]  # no reply after the last message
    assert len(results(trajectory)) == num_results
    assert trajectory.reward == 0.0


def test_the_token_limits_are_never_passed():
    stops = set()
    for max_tokens in range(90, 330, 30):
        limits = RolloutSettings(max_turns=5, max_tokens_per_turn=50, max_tokens=max_tokens)
        script = [call("look", item="lamp"), call("wait", minutes=3)] * 2 + [say("done and done")]
        trajectories, sampler = played(
            [script, [say("x" * 60)], script[1:]], {"desk": Desk}, limits
        )
        assert all(1 <= room <= 50 for room in sampler.limits)
        for trajectory in trajectories:
            assert trajectory.num_tokens <= max_tokens
            stops.add(trajectory.stop_reason)
    assert stops == {StopReason.COMPLETED, StopReason.MAX_TOKENS}


def test_a_malformed_call_is_answered_and_one_too_many_ends_the_episode():
    trajectory = play(MALFORMED, call("look", item="lamp"), MALFORMED)
    assert trajectory.stop_reason is StopReason.MALFORMED_CALL
    assert (trajectory.num_turns, trajectory.num_malformed_calls) == (3, 2)
    answers = results(trajectory)
    assert answers[0].startswith('{"error": "malformed call: ')
    assert answers[1] == '{"lamp": "seen "}'
    assert trajectory.reward == 0.0


# What the model does wrong is shown to it


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (call("dance"), error("unknown tool dance")),
        (call("get_reward"), error("unknown tool get_reward")),
        (call("reset"), error("unknown tool reset")),
        (call("__init__"), error("unknown tool __init__")),
        (call("_payload"), error("unknown tool _payload")),
        (call("row"), error("unknown tool row")),
        (call("look", thing="lamp"), error("wrong arguments: look takes item, times")),
        (call("wait", minutes="soon"), None),
        (call("jam"), error("paper jam")),
        (call("look", item="lamp", times=500), error("result too long")),
    ],
    ids=[
        "unknown",
        "get_reward",
        "reset",
        "dunder",
        "private",
        "attribute",
        "wrong name",
        "wrong type",
        "raises",
        "too long",
    ],
)
def test_a_call_that_fails_is_answered_with_an_error_and_the_episode_goes_on(message, answer):
    trajectory = play(message, say("done"))
    (given,) = results(trajectory)
    assert given == answer if answer else given.startswith('{"error": "wrong arguments: minutes:')
    assert given in tokenizer().decode(trajectory.completion_ids)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.COMPLETED, 1.0)


# What the environment does wrong is a status


class CountingDesk(Desk):
    user = SimpleNamespace(reply=lambda message: 7)


def test_a_user_who_replies_something_else_fails_its_episode_alone():
    tasks = [make_task(name) for name in ("first", "last")]
    trajectories, _ = played([[say("done")]] * 2, {"desk": CountingDesk}, LIMITS, tasks)
    assert [trajectory.task_id for trajectory in trajectories] == ["first", "last"]
    for trajectory in trajectories:
        assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR
        assert trajectory.error == "TypeError: the user replied int, not text or None"


# Users, tools that end, and TRL's style


class Customer:
    def __init__(self):
        self.heard = []

    async def reply(self, message):
        self.heard.append(message)
        return "the red one" if message.endswith("?") else None


class DeskWithCustomer(Desk):
    def __init__(self):
        self.user = Customer()


def test_a_user_answers_until_there_is_nothing_to_say():
    trajectory = play(say("which one?"), say("all done"), environment=DeskWithCustomer)
    assert trajectory.messages[2:] == [
        say("which one?"),
        {"role": "user", "content": "the red one"},
        say("all done"),
    ]
    assert "<|im_start|>user\nthe red one" in tokenizer().decode(trajectory.completion_ids)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.COMPLETED, 0.5)


def test_every_episode_has_an_environment_of_its_own_and_cannot_alter_the_task():
    class Vandal(Desk):
        def reset(self, **row):
            row["prompt"][-1]["content"] = "changed"
            assert not hasattr(self, "row")
            return super().reset(**row)

    task = make_task()
    trajectories, _ = played([[say("done")]] * 2, {"desk": Vandal}, LIMITS, [task, task])
    assert task == make_task()
    assert trajectories[0].prompt_ids == trajectories[1].prompt_ids


# Many episodes


def test_no_more_than_max_live_episodes_are_open_at_once_and_order_is_kept():
    limits = LIMITS.model_copy(update={"max_concurrent_episodes": 3})
    scripts = [[call("look", item="lamp")] * (n % 3) + [say("done")] for n in range(8)]
    trajectories, sampler = played(scripts, {"desk": Desk}, limits)
    assert sampler.most_open == 3
    assert [trajectory.task_id for trajectory in trajectories] == [f"t{n}" for n in range(8)]
    assert [trajectory.num_turns for trajectory in trajectories] == [1, 2, 3, 1, 2, 3, 1, 2]


class ShortOfMemory(RowSampler):
    """Has no memory for its `failing`-th call of `open` or `sample`, or for many conversations."""

    failing, num_calls, num_open, opened = None, 0, 0, ()

    def _allocate(self, number):
        self.num_calls += 1
        if self.num_calls == self.failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.opened = (*self.opened, number)

    def open(self, prompts, keys, num_drawn=()):
        self._allocate(len(prompts))
        return super().open(prompts, keys, num_drawn)

    def sample(self, episodes, max_tokens, greedy=False, until=None):
        self._allocate(-len(episodes))
        return super().sample(episodes, max_tokens, greedy, until)


@pytest.mark.parametrize(("failing", "number"), [(1, 8), (3, 4)])
def test_a_rollout_that_runs_out_of_memory_goes_on_with_half_as_many_episodes(
    failing, number, capsys
):
    module = module_of("retail")
    tasks = module.generate_tasks(5, 4, "train", "medium")
    model = tiny_model(tokenizer(), seed=1)
    limits = RolloutSettings(max_tokens=150, max_tokens_per_turn=12, max_concurrent_episodes=8)
    requests = [
        RolloutRequest(task=task, trial=trial, key=stream_key(1, *task.key, trial))
        for task in tasks
        for trial in range(3)
    ]
    played = []
    for fails in (None, failing):
        sampler = ShortOfMemory(model, chat().end_of_turn_id, 1.0, torch.float32, max_tokens=150)
        sampler.failing = fails
        rollout = rollout_of(sampler, chat(), embedded("retail"), limits)
        played.append(rollout(requests))
        assert not sampler._slots and not rollout.policy._open
        assert rollout.policy.max_episodes == (8 if fails is None else number // 2)
    assert [t.ids for t in played[0]] == [t.ids for t in played[1]]
    for one, other in zip(*played, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert (one.reward, one.num_turns, one.messages) == (
            *(other.reward, other.num_turns),
            other.messages,
        )
    assert max(map(abs, sampler.opened[failing - 1 :])) <= number // 2
    assert capsys.readouterr().err == (
        f"warning: out of memory in a rollout with {number} episodes at once; going on with "
        f"max_concurrent_episodes {number // 2}\n"
    )


def test_one_episode_that_does_not_fit_ends_the_run():
    model, limits = tiny_model(tokenizer(), seed=1), RolloutSettings(max_concurrent_episodes=1)
    sampler = ShortOfMemory(model, chat().end_of_turn_id, 1.0, torch.float32)
    sampler.failing = 2
    rollout = rollout_of(sampler, chat(), {"desk": Desk}, limits)
    with pytest.raises(RuntimeError, match=r"^out of memory in one episode; lower max_tokens, now"):
        rollout([RolloutRequest(task=make_task(), trial=0, key=0)])
