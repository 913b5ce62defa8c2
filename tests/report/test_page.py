"""The page of a report in a real browser: choosing shows the right episode, and nothing leaks."""

import base64
import gzip
import json
import re

import pytest
from tokenizers import Tokenizer, decoders, models

from pipeline.report.page_episodes import read_episodes
from pipeline.report.plots import pictures
from pipeline.report.write import rich, sections_of, table, write_report
from tests.support.browser import Page
from tests.support.report_runs import (  # noqa: F401
    THREE,
    episode,
    make_run,
    matplotlib_home,
    write_step,
)

pytestmark = pytest.mark.whole_run

EVIL = "</script><script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'>\u2028"


def write_tokenizer(folder):
    """Five tokens, of which two are the bytes of one character."""
    vocabulary = {"call": 0, "Ġlook": 1, "Ġup": 2, "Ã": 3, "¤": 4, "a": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def groups_of(stage_step, domains, tasks, num=2):
    """Groups in which trial 1 alone is solved, except that task 0 is solved by none."""
    return [
        episode(domain, f"{domain}-{stage_step}-{task}", trial, float(task > 0 and trial == 1))
        for domain in domains
        for task in range(tasks)
        for trial in range(num)
    ]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("page") / "a <b>run", THREE)
    write_tokenizer(folder / "checkpoints" / "final")
    start = [{**e, "advantage": None} for e in groups_of(0, THREE, 2)]
    write_step(folder, "evaluation-warm_start", 0, start)
    for step in range(1, 11):
        write_step(folder, "airline", step, groups_of(step, ["airline"], 2))
    for step in range(11, 14):
        both = groups_of(step, ["airline", "retail"], 3)
        write_step(folder, "retail", step, both[::2], rank=0)
        write_step(folder, "retail", step, both[1::2], rank=1)
    evil = [episode("retail", EVIL, trial, 0.0, error=EVIL) for trial in range(2)]
    for row in evil:
        row["messages"][3]["content"] = EVIL
        for message in row["messages"]:
            message |= {"reasoning_content": EVIL} if message["role"] == "assistant" else {}
        row["reward_breakdown"] = {EVIL: 0.0}
        row["difference"] = {EVIL: [EVIL, EVIL]}
    write_step(folder, "telecom", 21, evil)
    with pytest.MonkeyPatch.context() as patched:
        few = ("learning_curves", "accuracy_matrix")
        patched.setattr(pictures, "OF_RUN", {name: pictures.OF_RUN[name] for name in few})
        write_report(folder)
    return folder


def test_choosing_stage_step_domain_and_outcome_shows_that_episode(run_folder, browser):
    page = Page(browser, (run_folder / "report.html").as_uri())
    page.choose(stage="retail", step="12", domain="airline", outcome="some solved")
    assert page.shows("retail", 12, "airline", "airline-12-1")
    assert page.texts("#place") == ["Group 1 of 2"]
    first, second = page.texts("article")
    assert "reward 0" in first
    assert "reward 1" in second
    assert "order airline-12-1 of trial 0" in first
    assert "order airline-12-1 of trial 1" in second
    assert "max_turns · 2 turns · 5 sampled tokens · advantage -0.50" in first
    assert "orders.airline-12-1.statusopenpaid" in first.replace(" ", "")
    assert "orders" not in second
    assert "please pay airline-12-1" in page.texts(".shared")[0]
    browser.find_element("id", "next").click()
    assert page.shows("retail", 12, "airline", "airline-12-2")
    parts = page.texts("#group details")[-1]
    assert parts.startswith("The parts of the reward")
    assert "endedthe agent ended the episode" in parts
    assert page.complaints() == []


def test_tokens_are_coloured_by_advantage_or_log_probability_with_a_legend(run_folder, browser):
    page = Page(browser, (run_folder / "report.html").as_uri())
    page.choose(stage="airline", step="3", outcome="some solved")
    assert page.shows("airline", 3, "airline", "airline-3-1")
    spans_of = "[...card.querySelectorAll('.sampled .text span')]"
    colour_of = "(span) => getComputedStyle(span).backgroundColor"
    cards = "[...document.querySelectorAll('article')]"
    colours = f"return {cards}.map((card) => new Set({spans_of}.map({colour_of})).size)"
    first = f"return {cards}.map((card) => ({colour_of})({spans_of}[0]))"
    assert page.texts("article:first-of-type .sampled:first-of-type .text span")[:1] == ["call"]
    assert page.script(colours) == [1, 1], "an episode has one advantage"
    lost, won = page.script(first)
    assert lost != won
    assert "-1.00 made rarer" in page.texts("#legend")[0]
    page.colour_by("logprob")
    page.wait(lambda: "likely, 1" in page.texts("#legend")[0])
    assert page.script(colours) == [5, 5], "each token has a log-probability of its own"
    spans = page.texts("article:first-of-type .sampled .text span")
    assert spans == ["call", " look", " up", "", "ä"]
    browser.find_element("css selector", "article .sampled .text span").click()
    assert page.texts("#token") == ['token "call", probability 0.90 (log -0.10), advantage -0.50']
    page.colour_by("plain")
    page.wait(lambda: not page.texts("article .text span"))
    assert page.texts("article:first-of-type .call") == ['look_up({"id": "airline-3-1"})']


def test_an_evaluation_has_no_advantage_and_says_so(run_folder, browser):
    page = Page(browser, (run_folder / "report.html").as_uri())
    page.choose(stage="evaluation-warm_start", domain="telecom")
    assert page.shows("evaluation-warm_start", 0, "telecom", "telecom-0-0")
    assert page.texts("#legend")[0].startswith("An evaluation has no advantages")


def test_what_a_model_wrote_is_text_and_never_runs(run_folder, browser):
    page = Page(browser, (run_folder / "report.html").as_uri())
    page.choose(stage="telecom")
    page.wait(lambda: any("stolen" in text for text in page.texts("article .text")))
    assert page.script("return document.querySelectorAll('#group img, #group script').length") == 0
    assert page.script("return window.stolen") is None
    for mode in ("logprob", "plain"):
        page.colour_by(mode)
    page.wait(lambda: page.texts("article .message .facts"))
    assert all(text.startswith("thoughts: ") for text in page.texts("article .message .facts"))
    assert page.script("return document.querySelectorAll('#group img, #group script').length") == 0
    assert page.script("return window.stolen") is None
    assert page.complaints() == []


TURNED = "אבג 12\u202e34\u2066 \x1b[2J"


@pytest.fixture(scope="module")
def turned_folder(tmp_path_factory):
    """A run whose texts are of the other direction and try to turn the texts beside them."""
    folder = make_run(tmp_path_factory.mktemp("turned") / "run\u202efolder", THREE)
    rows = [episode("airline", TURNED, trial, 0.0, error=TURNED) for trial in range(2)]
    for row in rows:
        row |= {"family": TURNED, "preface": f"You are {TURNED}"}
        row["messages"][3]["content"] = TURNED
        row["difference"] = {TURNED: [TURNED, TURNED]}
    write_step(folder, "airline", 1, rows)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pictures, "OF_RUN", {})
        write_report(folder)
    return folder


def test_the_files_of_a_report_hold_no_control_characters(turned_folder):
    for name in ("report.md", "report.html"):
        text = (turned_folder / name).read_text(encoding="utf-8")
        assert not re.search("[\u202a-\u202e\u2066\u2067\x1b]", text), name


def test_a_phone_needs_not_scroll_sideways_and_has_the_colours_that_it_asks_for(
    run_folder, browser
):
    screen = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page = Page(browser, (run_folder / "report.html").as_uri())
    width = page.script("return document.documentElement.scrollWidth")
    hints = page.script(
        "return [...document.querySelectorAll('.scroll')].map(box => "
        "[box.scrollWidth > box.clientWidth, box.classList.contains('cut')])"
    )
    paper = page.script("return getComputedStyle(document.body).backgroundColor")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert width == 390
    assert {*map(tuple, hints)} == {(True, True), (False, False)}, "what scrolls is marked"
    assert paper == "rgb(20, 23, 26)"


def test_the_page_points_at_nothing_outside_of_it(run_folder):
    text = (run_folder / "report.html").read_text()
    assert (
        re.findall(
            r"""(?:src|href|action)\s*=\s*["']?(?!#|data:)[^"'>\s]+""", text.split("<script")[0]
        )
        == []
    )
    assert re.findall(r"url\(\s*[\"']?(?!#)[^)]*", text) == []
    assert re.findall(r"@import|<link rel=.?stylesheet|<iframe", text) == []
    assert not re.search(r"https?://", text.split('id="index"')[0])
    assert "default-src 'none'" in text


def test_episodes_of_all_ranks_make_one_group_in_order_of_trials(run_folder):
    reader = read_episodes(run_folder, unseen={"system": "a part"})
    assert reader.index["unseen"] == {"system": "a part"}
    assert reader.index["total"] == reader.index["shown"] == 12 + 40 + 36 + 2
    [row] = [group for group in reader.index["groups"] if group[6] == "retail-12-1"]
    assert row[7:] == [[0.0, 1.0], ["max_turns", "completed"]]
    chunk = json.loads(gzip.decompress(base64.b64decode(reader.chunks[row[2]])))
    trials = [[found["trial"] for found in group] for group in chunk["groups"]]
    assert trials == 6 * [[0, 1]]


def test_a_transcript_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path):
    write_step(tmp_path, "airline", 1, groups_of(1, ["airline"], 40))
    [path] = tmp_path.rglob("*.gz")
    path.write_bytes(path.read_bytes()[:-200])
    index = read_episodes(tmp_path).index
    assert 40 < index["total"] < 80
    assert index["shown"] == index["total"]


def test_text_is_escaped_before_its_marks_become_elements():
    assert rich("`<b>` and *so*") == "<code>&lt;b&gt;</code> and <em>so</em>"
    assert rich("**two** <i>") == "<strong>two</strong> &lt;i&gt;"


@pytest.mark.parametrize("name", ["a|b", "a\n\n## b", "![a](b.png)", "- a", "", "\\", "a\n| b |"])
def test_a_name_cannot_begin_a_block_or_a_cell(name):
    markdown = f"# page\n\n## part\n\n{table([['domain', name], [name, '1']])}\n"
    first, part = sections_of(markdown)
    assert first["blocks"] == []
    [(kind, content)] = part["blocks"]
    seen = name.replace("\n\n", " ").replace("\n", " ")
    assert (kind, content["header"], content["rows"]) == ("table", ["domain", seen], [[seen, "1"]])
    assert content["is_left"] == [True, False]


def test_json_in_the_page_cannot_end_its_element(run_folder):
    page = (run_folder / "report.html").read_text()
    text = page.split('<script type="application/json" id="index">')[1].split("</script>")[0]
    assert not set("<>&\u2028") & set(text)
    assert "<h1>a &lt;b&gt;run</h1>" in page and "<b>" not in page
    assert EVIL in [group[6] for group in json.loads(text)["groups"]]
