"""The page of a run that goes on, in a real browser, and the lines of `status`."""

import json
import platform
import re
import shutil
import socket
import threading
import time
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from pipeline.errors import UserError
from pipeline.files import console
from pipeline.files.layout import METRICS, RANKS, WARNINGS
from pipeline.plots import pictures
from pipeline.report import status
from pipeline.report.server import server_of
from pipeline.report.watch import LivePage, page_beside
from pipeline.tracking.run_files import load_run
from tests.support.browser import Page
from tests.support.report_runs import (  # noqa: F401
    THREE,
    episode,
    make_run,
    matplotlib_home,
    write_step,
)

EVIL = "</script><script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'>"


def post_ranks(folder, phases=("sample airline step 2",), age_s=0.0, **more):
    """Where the ranks are, as rank 0 of a run writes it."""
    ranks = [
        {"rank": rank, "host": EVIL, "phase": phase, "waits_for": "", "idle_s": 1.0}
        for rank, phase in enumerate(phases)
    ]
    posted = {"time": time.time() - age_s, "is_over": False, "why": "", "ranks": ranks}
    (folder / RANKS).write_text(json.dumps({**posted, **more}))


def write_episodes(folder, step):
    both = [episode("airline", f"task-{step}", trial, float(trial)) for trial in range(2)]
    both[0]["messages"][3]["content"] = EVIL
    write_step(folder, "airline", step, both)


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    wanted = {"learning_curves": pictures.learning_curves}  # to draw all takes seconds
    monkeypatch.setattr(pictures, "OF_RUN", wanted)
    folder = make_run(tmp_path / "a <b>run", THREE)
    write_episodes(folder, 1)
    post_ranks(folder)
    return folder


@contextmanager
def served(folder, host="127.0.0.1", port=0):
    """The address of a page."""
    page = LivePage(folder)
    server = server_of(page, host, port)
    is_over = threading.Event()

    def renew():
        while not is_over.is_set():
            page.renew()

    with server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        renewing = threading.Thread(target=renew)
        serving.start()
        renewing.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            is_over.set()
            serving.join()
            renewing.join()


def trouble(address, text):
    """What a server answers to something that is hardly a request."""
    port = int(address.split("/")[2].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as link:
        link.sendall(text.encode())
        link.shutdown(socket.SHUT_WR)
        return link.makefile().read()


def answer(address, **headers):
    try:
        with urlopen(Request(address, headers=headers), timeout=30) as found:
            return found.status, found.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_the_page_follows_a_run_that_goes_on_and_then_is_gone(run_folder, browser):
    with served(run_folder) as address:
        page = Page(browser, address)
        assert page.shows("airline", 1, "airline", "task-1")
        assert "running: telecom, step 30 of 30" in page.texts("#now")[0]
        assert EVIL in page.texts("#now")[0]
        page.wait(lambda: page.script("return !!document.querySelector('#curves svg')"))

        write_episodes(run_folder, 2)
        post_ranks(run_folder, ["update airline step 2", "wait"])
        with (run_folder / METRICS).open("a") as file:
            file.write('{"kind": "train", "stage": "telecom", "step": 31, "reward/airline": 0.5}\n')
        assert page.shows("airline", 2, "airline", "task-2"), "the newest, unasked"
        page.wait(lambda: "update airline step 2" in page.texts("#now")[0])

        page.choose(step="1")
        assert page.shows("airline", 1, "airline", "task-1")
        write_episodes(run_folder, 3)
        with (run_folder / METRICS).open("a") as file:
            file.write('{"kind": "train", "stage": "telecom", "step": 32, "reward/airline": 0.5}\n')
        page.wait(lambda: "3" in page.offered("step"))
        assert page.shows("airline", 1, "airline", "task-1"), "what was chosen stays"

        post_ranks(run_folder, age_s=status.STALE_S + 1)
        page.wait(lambda: "finished: telecom" in page.texts("#now")[0])
        shutil.rmtree(run_folder)
        page.wait(lambda: "not renewed now" in page.texts("#now")[0])
        assert page.shows("airline", 1, "airline", "task-1")
        assert page.script("return window.stolen") is None
        assert page.complaints() == []
    page.wait(lambda: "does not answer" in page.texts("#live")[0])


def test_a_phone_sees_the_page_without_scrolling_sideways_in_its_colours(run_folder, browser):
    screen = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    colours = []
    with served(run_folder) as address:
        for scheme in ("light", "dark"):
            wanted = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
            page = Page(browser, address)
            colours.append(page.script("return getComputedStyle(document.body).backgroundColor"))
            width = page.script("return document.documentElement.scrollWidth")
            assert width <= 390
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert colours == ["rgb(255, 255, 255)", "rgb(20, 23, 26)"]


def test_the_server_reads_alone_and_answers_only_its_own_machine_or_who_has_the_token(
    run_folder, capsys
):
    before = {path: path.stat().st_mtime_ns for path in run_folder.rglob("*")}
    with served(run_folder) as address:
        code, page = answer(address)
        assert code == 200
        assert "connect-src &#39;self&#39;" in page or "connect-src 'self'" in page
        found = json.loads(answer(f"{address}now")[1])
        assert found["version"] >= 1
        assert "<section" in found["html"]
        assert answer(f"{address}config.yaml")[0] == 404
        assert answer(f"{address}../config.yaml")[0] == 404
        assert answer(address, Host="another.example")[0] == 403, "a name that leads here"
        assert answer(address, Host="localhost:1")[0] == 200, "an SSH tunnel"
        port = int(address.rstrip("/").rpartition(":")[2])
        for host, number in (("127.0.0.1", port), ("127.0.0.1", 70_000), ("no.invalid", 0)):
            with pytest.raises(UserError, match=rf"^watch: got {host}, port {number} \(.+\); give"):
                server_of(LivePage(run_folder), host, number)
        for text in ("GET http://[/ HTTP/1.0", "GET / HTTP/1.0\r\nHost: ["):
            assert "200" not in trouble(address, f"{text}\r\n\r\n")
        size = "POST / HTTP/1.0\r\nHost: localhost\r\nX-Page: 1\r\nContent-Length: x"
        assert "200" not in trouble(address, f"{size}\r\n\r\n")
    with served(run_folder, "0.0.0.0") as address:
        assert f"//{platform.node()}:" in address
        whole = address.replace(platform.node(), "127.0.0.1")
        assert "?token=" in whole
        assert answer(whole)[0] == 200
        assert answer(whole[:-1] + "!")[0] == answer(f"{whole}%C3%A9")[0] == 403
        assert answer(whole.partition("?")[0])[0] == 403
    assert {path: path.stat().st_mtime_ns for path in run_folder.rglob("*")} == before
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="holds no run, or the run has not begun"):
        LivePage(run_folder.parent)


def test_a_run_serves_its_page_as_long_as_it_lasts(run_folder, capfd):
    with page_beside(run_folder):
        said = ""
        while not (found := re.search(r"in a browser: (\S+) \(as long as the run lasts", said)):
            said += capfd.readouterr().out
            time.sleep(0.05)
        assert answer(found[1])[0] == 200
    with pytest.raises(OSError, match="refused"):
        answer(found[1])


@pytest.mark.parametrize(
    ("age_s", "more", "is_whole", "expected"),
    [
        (0, {}, False, "running: telecom, step 30 of 40, about 20 s left in GRPO's steps"),
        (60, {}, False, "killed: telecom, step 30 of 40"),
        (60, {"is_over": True}, True, "finished: telecom, step 30 of 40"),
        (60, {"is_over": True}, False, "finished: telecom, step 30 of 40"),
        (0, {"is_over": True, "why": "OSError: x"}, False, "ended (OSError: x): telecom, step 30"),
    ],
)
def test_status_says_where_a_run_is(run_folder, capsys, age_s, more, is_whole, expected):
    settings = run_folder / "config.yaml"
    settings.write_text(settings.read_text().replace("max_steps: 30", "max_steps: 40"))
    post_ranks(run_folder, ["sample", "wait"], age_s, **more)
    if not is_whole:
        (run_folder / "results.json").unlink()
    assert status.main([str(run_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"a <b>run: {expected}")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    assert any("sample" in line for line in lines) == expected.startswith("running")


def test_status_of_several_runs_and_as_json(run_folder, capsys):
    other = shutil.copytree(run_folder, run_folder.with_name("other"))
    folders = [str(run_folder), str(other)]
    assert status.main(folders) == 0
    header, line, again = capsys.readouterr().out.splitlines()
    assert line.split()[2:] == again.split()[1:]
    assert header.split() == ["run", "state", "step", "reward", "success"]
    assert len(line) <= 80
    assert "30/30" in line
    assert status.main([*folders, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [of.pop("name") for of in found] == ["a <b>run", "other"]
    assert [of.pop("folder") for of in found] == folders
    assert found[0] == found[1]
    assert (found[0]["state"], found[0]["step"]) == ("running", 30)
    assert found[0]["ranks"][0]["phase"] == "sample airline step 2"


def test_success_is_the_latest_of_validations_and_evaluations(run_folder):
    with (run_folder / METRICS).open("a") as file:
        file.write('{"kind": "validation", "step": 900, "validation/retail/success": 0.125}\n')
    found = status.status_of(load_run(run_folder))["success"]
    assert found["retail"] == 0.125
    assert set(found) == {*THREE}


def test_warnings_of_a_run_are_kept_and_shown_the_newest_first(run_folder, browser, capsys):
    console.say("warning: before the folder is there")
    with console.kept_warnings(run_folder / WARNINGS):
        console.say(f"warning: step 3: {EVIL}\x1b[2J of two\nlines")
        console.say("note: no warning")
        for number in range(status.MOST_WARNINGS - 1):
            console.say(f"warning: of rank {number}")
    with console.kept_warnings(run_folder / "gone" / WARNINGS):
        console.say("warning: of a folder that is gone")
    said = capsys.readouterr().err.splitlines()
    kept = (run_folder / WARNINGS).read_text().splitlines()
    times, texts = zip(*((line[:19], line[20:]) for line in kept), strict=True)
    assert [time.strptime(of, "%Y-%m-%d %H:%M:%S") for of in times]
    assert texts[-6:-4] == ("before the folder is there", f"step 3: {EVIL}\\x1b[2J of two lines")
    assert texts[-1] == "of rank 3"
    assert [line for line in said if line.startswith("note")] == ["note: no warning"]
    shown = status.status_of(load_run(run_folder))["warnings"]
    assert shown[0].endswith("of rank 3")
    assert shown[-1].endswith("of two lines")
    with served(run_folder) as address:
        page = Page(browser, address)
        assert EVIL in page.texts("#now")[0]
        assert page.script("return window.stolen") is None


def test_a_tab_of_another_run_or_of_a_folder_that_begins_again_shows_what_is_there(
    run_folder, browser, tmp_path
):
    other = make_run(tmp_path / "other", THREE)
    write_episodes(other, 5)
    with served(run_folder) as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        page = Page(browser, address)
        shutil.rmtree(run_folder / "trajectories")
        with (run_folder / METRICS).open("a") as file:
            file.write('{"kind": "train", "stage": "telecom", "step": 31}\n')
        page.wait(lambda: not page.texts("#episodes"))
        write_episodes(run_folder, 7)
        with (run_folder / METRICS).open("a") as file:
            file.write('{"kind": "train", "stage": "telecom", "step": 32}\n')
        assert page.shows("airline", 7, "airline", "task-7")
        assert page.texts("h1") == ["a <b>run"]
        assert page.texts("#live") == [""]
    with served(other, port=port):
        page.wait(lambda: page.texts("h1") == ["other"])
        assert page.shows("airline", 5, "airline", "task-5")


def test_status_wraps_long_lines_and_refuses_what_no_run_has_written(run_folder, capsys, tmp_path):
    why = "CollectiveError: update: [/a/path/of/gloo/transport.cc:534] Read error; rank 1 is gone"
    post_ranks(run_folder, is_over=True, why=why)
    assert status.main([str(run_folder.parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert why in " ".join(line.strip() for line in lines)
    for text in ("", "[1]", "a: b", "{"):
        (run_folder / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=r"config.yaml is not what a run writes; restore it"):
            status.main([str(run_folder)])
    with pytest.raises(UserError, match="no folder"):
        status.main([str(tmp_path / "nowhere")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no run"):
        status.main([str(tmp_path / "empty")])
