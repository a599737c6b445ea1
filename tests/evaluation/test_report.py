"""The page of several runs, in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longnet.config.cli import is_user_error
from longnet.evaluation.report import collect_run, differing_keys, latest_evaluation, write_report

from .pages import write_run

EMPTY = {"contexts": [], "positions": [], "retrieval": [], "placements": []}
ROOT = Path(__file__).parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [
        write_run(root / "tiny-dilated-stdlib", 2.0),
        write_run(root / "tiny-dense-stdlib", 1.8, attention__layers=["dense"], data__context_length=1024),
    ]


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
    target = tmp_path_factory.mktemp("page") / "report.html"
    write_report(runs, target)
    return target


def test_a_run_is_collected_whole(runs):
    run = collect_run(runs[0])
    assert run["curves"]["train/loss"][0] == [1.0, 5.0]
    assert len(run["curves"]["val/loss"]) == 4
    assert run["speed"]["tokens_per_second"] == 1020.5
    assert [block["keys"] for block in run["pattern"]["blocks"]] == [64 * 4]
    assert run["pattern"]["receptive"][-1] == 1.0
    assert run["evaluation"]["retrieval"][0]["task"] == "passkey"


def test_only_what_differs_is_listed():
    rows = differing_keys([{"a": 1, "b": [2], "run.name": "x"}, {"a": 1, "b": [3], "run.name": "y", "c": None}])
    assert rows == [{"key": "b", "values": ["[2]", "[3]"]}]


def test_long_curves_are_thinned_and_keep_their_ends(tmp_path):
    run = collect_run(write_run(tmp_path / "long", steps=5001))
    curve = run["curves"]["train/loss"]
    assert len(curve) <= 801
    assert (curve[0][0], curve[-1][0]) == (1.0, 5001.0)


def test_the_evaluation_of_a_script_goes_before_those_of_training(tmp_path):
    for name, value in (("step-9", 9), ("step-10", 10)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps({**EMPTY, "value": value}))
    assert latest_evaluation(tmp_path) == {**EMPTY, "value": 10}
    (tmp_path / "results.json").write_text(json.dumps(EMPTY))
    assert latest_evaluation(tmp_path) == EMPTY
    assert latest_evaluation(tmp_path / "none") is None


@pytest.mark.parametrize("text", ['{"contexts": [', "{}", "[]"])
def test_results_that_are_not_whole_are_named(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match=r"results\.json.*: expected what scripts/evaluate.py writes") as caught:
        latest_evaluation(tmp_path)
    assert is_user_error(caught.value)


def test_a_step_without_a_number_is_named(tmp_path):
    (tmp_path / "step-old").mkdir()
    (tmp_path / "step-old/results.json").write_text(json.dumps(EMPTY))
    with pytest.raises(ValueError, match="step-old: expected a number behind step-"):
        latest_evaluation(tmp_path)


@pytest.mark.parametrize("text", ["", "data: [", "model: {}\n"])
def test_a_config_that_is_not_whole_is_named(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config\.yaml.*: expected the config of a run") as caught:
        collect_run(tmp_path)
    assert is_user_error(caught.value)


def test_the_page_holds_everything_itself(report):
    html = report.read_text()
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", html)
    assert not re.findall(r"https?://(?!www\.w3\.org)", html)
    assert "/*DATA*/" not in html
    # What a run wrote cannot end the script that holds it.
    assert html.count("</script>") == 2


def test_the_command_writes_the_page_or_says_why_not(runs, tmp_path):
    command = [sys.executable, ROOT / "scripts/report.py"]
    done = subprocess.run([*command, *runs, "--out", tmp_path / "r.html"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "r.html").is_file()
    done = subprocess.run([*command, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "holds no run: expected the directory of one" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def browser():
    if BROWSER is None:
        pytest.skip("needs a browser: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(params=["light", "dark"])
def page(request, browser, report):
    opened = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme=request.param)
    opened.problems = []
    opened.on("console", lambda message: opened.problems.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))
    # Nothing is asked of a network.
    opened.route(re.compile("^(?!file:|data:)"), lambda route: opened.problems.append(route.request.url))
    opened.goto(report.as_uri())
    yield opened
    assert opened.problems == []
    opened.close()


def test_everything_is_drawn(page):
    titles = page.locator("section h2").all_inner_texts()
    assert titles == [
        "Training", "Context", "Retrieval", "Needles at awkward places", "Attention patterns", "Speed and memory",
        "Where the configs differ", "Samples",
    ]  # fmt: skip
    assert page.locator(".chart").count() == 12
    assert page.locator("path[data-run=dense]").count() == page.locator("path[data-run=dilated]").count() > 5
    assert "not markup" in page.locator("pre").first.inner_text()
    assert page.locator("pre b").count() == 0
    differing = page.locator("section", has_text="Where the configs differ").locator("td").all_inner_texts()
    assert "attention.layers" in differing
    # The canvas of a pattern has both seen and unseen cells.
    shares = page.evaluate("() => [...document.querySelector('canvas').getContext('2d').getImageData(0,0,64,64).data]")
    assert 0 < sum(alpha > 0 for alpha in shares[3::4]) < 64 * 64


def test_charts_answer_to_the_pointer(page):
    tip = page.locator("#tip")
    assert tip.is_hidden()
    chart = page.locator(".chart svg").first
    chart.hover(position={"x": 200, "y": 100})
    text = tip.inner_text()
    assert re.match(r"step \d+", text)
    assert "dilated" in text
    assert "dense" in text
    chart.hover(position={"x": 60, "y": 100})
    assert tip.inner_text() != text
    page.locator(".heat td").first.hover()
    assert "preferred 1 (0.2 to 1)" in tip.inner_text()
    page.locator("canvas").first.hover(position={"x": 5, "y": 200})
    assert "of the pairs seen" in tip.inner_text()
    page.mouse.move(2, 2)
    assert tip.is_hidden()


def test_runs_tasks_and_heads_can_be_chosen(page):
    page.get_by_role("button", name="dense").click()
    assert page.locator("path[data-run=dense]").count() == 0
    assert page.locator("path[data-run=dilated]").count() > 0
    assert page.get_by_role("button", name="dense").get_attribute("aria-pressed") == "false"
    assert page.locator("section", has_text="Where the configs differ").count() == 0
    page.get_by_role("button", name="dilated").click()
    assert page.locator("#page").inner_text() == "Choose a run above."
    page.get_by_role("button", name="dense").click()
    page.get_by_role("button", name="dilated").click()

    before = page.locator(".heat").first.inner_text()
    page.get_by_label("Measure").select_option("generated")
    assert page.locator(".heat").first.inner_text() != before
    page.get_by_label("Task").select_option("needle")
    assert page.get_by_label("Measure").input_value() == "generated"
    picture = page.locator("canvas").first.evaluate("node => node.toDataURL()")
    page.get_by_label("Head").select_option("head 1")
    assert page.locator("canvas").first.evaluate("node => node.toDataURL()") != picture


def test_it_is_readable_on_a_phone(page):
    page.set_viewport_size({"width": 375, "height": 700})
    page.wait_for_function("document.querySelector('svg').viewBox.baseVal.width < 375")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    sizes = page.evaluate("[...document.querySelectorAll('svg text')].map(each => each.getBoundingClientRect().height)")
    assert min(size for size in sizes if size) >= 10


def test_light_and_dark_differ_and_both_have_contrast(page):
    ground, ink = page.evaluate(
        "() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; }"
    )
    brightness = [sum(map(int, re.findall(r"\d+", color)[:3])) / 765 for color in (ground, ink)]
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (brightness[0] < brightness[1]) == dark
    assert abs(brightness[0] - brightness[1]) > 0.6
