"""Episodes that go on in later steps: the same tokens as in one go, as long as the weights stay."""

import asyncio
import json
import math
import sys
from itertools import count

import pytest
import torch

from pipeline.config.settings import Config, RolloutSettings
from pipeline.distributed.ranks import Ranks
from pipeline.environments import Domain
from pipeline.environments.agent_process import agent_process
from pipeline.models.tiny import tiny_model
from pipeline.rollout.rollout import RolloutRequest
from pipeline.rollout.samplers.generate import GenerateSampler
from pipeline.rollout.samplers.own import RowSampler
from pipeline.rollout.trajectory import Conversation, Pace, Trajectory
from pipeline.training.open_groups import OpenGroups
from tests.support import ROOT
from tests.support.helpers import chat, make_task, rollout_of, tokenizer

LIMITS = RolloutSettings(max_turns=9, max_tokens=600, max_tokens_per_turn=30, num_generations=2)
DESK_PROGRAM = f"{sys.executable} -S -P {ROOT / 'tests' / 'support' / 'desk_program.py'}"
STOPS = range(0, len(tokenizer()), 12)  # ids that end a message, so that lengths differ
SHARE = 4  # tokens of an episode in a step


class Customer:
    """Says two things."""

    def __init__(self):
        self.left = 2

    def answer(self):
        self.left -= 1
        return f"and then {self.left}" if self.left >= 0 else None

    def reply(self, message):
        return self.answer()


class Slow(Customer):
    async def reply(self, message):
        await asyncio.sleep(0.01)
        return self.answer()


class Moody(Customer):
    """Says something else each time."""

    numbers = count()

    def reply(self, message):
        return self.answer() and f"now {next(self.numbers)}"


def talk(kind):
    class Talk:
        def reset(self, **row):
            self.user = kind()

        def get_reward(self):
            return 1.0

    return Talk


Talk, SlowTalk, MoodyTalk = map(talk, (Customer, Slow, Moody))


class Counter(Talk):
    def look(self, item: str) -> str:
        """Look an item up.

        Args:
            item: Its name.
        """
        return item


async def conversations(policy, task):
    """A loop that does not know of steps: two conversations, each of two messages."""
    for first in ("one", "two"):
        said = [{"role": "user", "content": first}]
        for _ in range(2):
            said.append(await policy.message(said))
            said.append({"role": "user", "content": "go on"})
            if said[-2]["finish_reason"] == "length":
                break
    return 1.0


def rollout(environment=Talk, sampler=RowSampler, deterministic=True, stops=STOPS, **settings):
    limits = LIMITS.model_copy(update=settings)
    model = tiny_model(tokenizer(), seed=1)
    samples = sampler(model, chat().end_of_turn_id, 1.0, torch.float32, other_stops=stops)
    is_made = isinstance(environment, (type, Domain))
    domain = environment if is_made else Domain(name="desk", loop=environment)
    return rollout_of(samples, chat(), {"desk": domain}, limits, deterministic)


def requests(number=3, begun=0):
    tasks = [make_task(f"t{begun}-{n}", payload="{}") for n in range(number)]
    return [RolloutRequest(task=t, trial=0, key=n, begun=begun) for n, t in enumerate(tasks)]


def in_parts(playing, most=SHARE):
    """The trajectories of episodes that sample `most` tokens in a step, and their versions."""
    episodes = playing.begin(requests())
    step = 0
    while not all(episode.has_ended for episode in episodes):
        for episode in episodes:
            episode.pace.most, episode.pace.version = most, step
        playing.go_on([episode for episode in episodes if not episode.has_ended])
        playing.policy.rest()
        step += 1
        assert step < 99
    trajectories = playing.end(episodes)
    playing.drop(episodes)
    return trajectories


@pytest.mark.parametrize("sampler", [RowSampler, GenerateSampler])
@pytest.mark.parametrize("environment", [Talk, SlowTalk, conversations])
def test_parts_have_the_tokens_of_the_whole(sampler, environment):
    whole = rollout(environment, sampler)(requests())
    parts = in_parts(rollout(environment, sampler))
    for one, other in zip(whole, parts, strict=True):
        assert one.num_sampled_in_all > 3 * SHARE and one.reward == 1.0
        for a, b in zip(one.sequences, other.sequences, strict=True):
            assert (a.ids, a.loss_mask) == (b.ids, b.loss_mask)
            assert b.logprobs == pytest.approx(a.logprobs, abs=1e-4)
            assert a.versions == [] and len(b.versions) == b.num_sampled_tokens
        versions = [version for part in other.sequences for version in part.versions]
        assert versions == sorted(versions)
        assert max(map(versions.count, versions)) == SHARE
        assert one.messages == other.messages


def test_a_process_that_waits_for_the_next_step_takes_no_place_of_another():
    program = agent_process("agents: desk", DESK_PROGRAM, prints_reward=False)
    domain = Domain(name="desk", environment=Counter, loop=program)
    whole = rollout(domain)(requests())
    parts = in_parts(rollout(domain, max_agents=1))
    for one, other in zip(whole, parts, strict=True):
        assert one.num_turns > 1 and one.reward == 1.0
        assert (one.ids, one.messages) == (other.ids, other.messages)
        assert other.versions[-1] > 1


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_text_that_ends_a_message_ends_it_in_parts_too(size):
    """The text is three tokens long, and a step may end inside it."""
    policy = rollout(stops=(), max_tokens_per_turn=40).policy

    def said(stop, most):
        messages = [{"role": "user", "content": "say something"}]
        trajectory = Trajectory(domain="desk", task_id="t", messages=messages)
        pace = Pace(most=most, version=0)
        conversation = Conversation(
            trajectory=trajectory, schemas=[], key=7, is_text=True, stop=stop, pace=pace
        )

        async def message():
            asked = asyncio.ensure_future(policy.message(conversation))
            while not asked.done():
                pace.left = most
                await asyncio.sleep(0)
                if policy.num_waiting:
                    policy.step()
                await asyncio.sleep(0)
            policy.close(conversation)
            return asked.result()

        return asyncio.run(message()), trajectory

    _, whole = said((), math.inf)
    text = tokenizer().decode(whole.completion_ids[6:9])
    expected, short = said((text,), math.inf)
    found, parts = said((text,), size)
    assert expected.at_stop and 0 < short.num_sampled_tokens <= 9
    assert found == expected
    assert (parts.ids, parts.num_sampled_tokens) == (short.ids, len(parts.versions))


def groups_of(environment, rank=0, num_ranks=1, **settings):
    """Open groups of a rank that plays alone, as if there were others."""
    ranks = Ranks(rank, 1, 60)
    ranks.shard = lambda number: range(rank, number, num_ranks)
    rollouts = {"num_generations": 2, "partial_rollout_tokens": SHARE, **settings}
    config = Config.model_validate(
        {
            "rollout": rollouts,
            "data": {
                "domains": ["desk"],
                "environments": {"desk": "tests.support.helpers:Desk"},
            },
        }
    )
    return OpenGroups(rollout(environment, **settings), ranks, config)


def play_step(groups, step, tasks, **at_the_end):
    groups.begin_step(step, **at_the_end)
    waiting = groups.open
    waiting += groups.begin(tasks, "stage", 0)
    ended = groups.take(groups.play(waiting))
    groups._rollout.policy.rest()
    return ended


TASKS = [[make_task(f"{step}-{n}", payload="{}") for n in range(2)] for step in range(9)]


@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_group_ends_whole_and_never_too_late(most):
    groups = groups_of(Talk, max_staleness=most)
    found = {}
    for step, tasks in enumerate(TASKS):
        for group in play_step(groups, step, tasks, drains=step == 8):
            assert len(group.trajectories) == 2 and group.task.id not in found
            found[group.task.id] = group
            versions = [v for t in group.trajectories for v in t.versions]
            assert group.step == int(group.task.id[0]) and step - min(versions) <= most
            per_step = [t.versions.count(v) for t in group.trajectories for v in range(step)]
            assert all(number <= SHARE for number in per_step)
    assert len(found) == 18 and not groups.open


def test_groups_that_no_checkpoint_can_hold_end_before_it():
    for environment, num_left in ((Talk, 2), (SlowTalk, 0), (conversations, 0)):
        groups = groups_of(environment)
        play_step(groups, 0, TASKS[0], saves=True)
        assert len(groups.open) == num_left


def test_what_breaks_while_an_episode_waits_ends_the_rollout(monkeypatch):
    """As the tokenizer may, on an answer that comes when the episode has no tokens left."""
    playing = rollout(SlowTalk)
    read = playing.policy._read

    def broken(conversation):
        if conversation.pace.left <= 0:
            raise RuntimeError("broken")
        return read(conversation)

    monkeypatch.setattr(playing.policy, "_read", broken)
    with pytest.raises(RuntimeError, match="broken"):
        in_parts(playing)
    playing.close()


def test_a_checkpoint_within_a_step_keeps_what_the_step_has_ended():
    groups = groups_of(Talk)
    for step in (0, 1):
        play_step(groups, step, TASKS[step])
    before = {group.key for group in groups.open}
    ended = play_step(groups, 2, TASKS[2], drains=True)
    assert len(ended) == 6 and not groups.open
    saved = groups.state_dict(2)["open_groups"]
    assert {(group["step"], group["place"]) for group in saved} == before
    assert groups.state_dict(3)["open_groups"] == []


def test_a_resume_with_other_settings_begins_anew():
    groups = groups_of(Talk)
    for step in (0, 1):
        play_step(groups, step, TASKS[step])
    state = {"step": 2, **groups.state_dict(2)}
    for settings in ({"max_staleness": 1}, {"partial_rollout_tokens": 0}):
        other = groups_of(Talk, **settings)
        assert other.load_state_dict(json.loads(json.dumps(state)), "stage") == ["desk"]
        ended = play_step(other, 2, TASKS[2], drains=True)
        versions = {v for g in ended if g.step < 1 for t in g.trajectories for v in t.versions}
        assert len(ended) == 6 and versions <= {2}


def texts_of(groups):
    return {g.task.id: [(t.ids, t.versions, t.logprobs) for t in g.trajectories] for g in groups}


def resumed(environment, num_ranks=1):
    """What steps 2 to 9 end after a checkpoint, on other ranks; the state; the domains anew."""
    before = groups_of(environment)
    for step in (0, 1):
        play_step(before, step, TASKS[step])
    # Of a step that does not come to its end, nothing is saved.
    before.begin_step(2)
    before.play([*before.groups, *before.begin(TASKS[2], "stage", 0)])
    state = json.loads(json.dumps({"step": 2, **before.state_dict(2)}))
    before._rollout.drop([e for g in before.groups for e in g.episodes])
    found, anew = {}, []
    for rank in range(num_ranks):
        groups = groups_of(environment, rank, num_ranks)
        anew = groups.load_state_dict(json.loads(json.dumps(state)), "stage")
        for step in range(2, 9):
            found |= texts_of(play_step(groups, step, TASKS[step], drains=step == 8))
    return found, state["open_groups"], anew


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_open_episodes_go_on_after_a_resume_on_any_number_of_ranks(num_ranks, capsys):
    undisturbed = groups_of(Talk)
    expected = {}
    for step, tasks in enumerate(TASKS):
        expected |= texts_of(play_step(undisturbed, step, tasks, drains=step == 8))
    found, saved, anew = resumed(Talk, num_ranks)
    assert len(saved) == 4 and not anew
    assert {name: expected[name] for name in found} == found
    assert {group["task"]["id"] for group in saved} <= found.keys()
    assert "answers other than before" not in capsys.readouterr().err


def test_what_cannot_be_called_again_begins_anew_and_other_answers_are_told(capsys):
    for environment in (SlowTalk, conversations):
        found, saved, anew = resumed(environment)
        assert anew == ["desk"] and saved and len(found) == 18
    found, saved, anew = resumed(MoodyTalk)
    assert not anew and len(found) == 18
    told = capsys.readouterr().err
    assert "desk/0-0: its environment answers other than before" in told
