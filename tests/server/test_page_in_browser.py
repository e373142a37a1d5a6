"""The page in a real browser (Debian's Chromium, headless), against a server that shows given records."""
from __future__ import annotations

import dataclasses
import pathlib
import sys

import pytest

from llmgw.domain.errors import TryAgain
from tests.fakes import example_cluster as example
from tests.fakes.view_server import ViewServer

webdriver = pytest.importorskip("selenium.webdriver", reason=(
    "selenium is only in the development set of newer Pythons (pyproject.toml)" if sys.version_info < (3, 11)
    else "selenium is not installed: pip install -e '.[dev]'"))
from selenium.common.exceptions import StaleElementReferenceException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

pytestmark = pytest.mark.slow

CHROMIUM, DRIVER = pathlib.Path("/usr/bin/chromium"), pathlib.Path("/usr/bin/chromedriver")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,900")
TOKEN = "llmgw_viewer_test"
PATIENCE_SECONDS = 60


class Page:
    """What a person can do and see."""

    def __init__(self, driver, server):
        self.driver, self.server = driver, server

    def open(self):
        self.driver.get(self.server.url)
        return self

    def enter(self, token=TOKEN):
        field = self.wait(lambda: self.visible("#token"), "the field for the token")
        field.clear()
        field.send_keys(token, Keys.ENTER)
        return self

    def find(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def visible(self, selector):
        return next((element for element in self.all(selector) if element.is_displayed()), None)

    def text(self, selector="body"):
        return "\n".join(element.text for element in self.all(selector))

    def wait(self, condition, what):
        return WebDriverWait(self.driver, PATIENCE_SECONDS, 0.1, [StaleElementReferenceException]).until(
            lambda _: condition(), f"waited for {what}; the page says:\n{self.text()}")

    def wait_text(self, text, selector="body"):
        self.wait(lambda: text in self.text(selector), f"{text!r} in {selector}")

    def node(self, name, selector=".says"):
        """Return the texts of what matches in the row of one node."""
        found = [body for body in self.all("#nodes-table > tbody")
                 if body.find_element(By.CSS_SELECTOR, "td.name bdi").text == name]
        assert len(found) == 1, (name, self.text("#nodes"))
        return [element.text for element in found[0].find_elements(By.CSS_SELECTOR, selector)]

    def emulate(self, width, height=900):
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600})

    def script(self, text, *args):
        return self.driver.execute_script(text, *args)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    absent = [str(path) for path in (CHROMIUM, DRIVER) if not path.exists()]
    if absent:
        pytest.fail(f"{' and '.join(absent)} not found: apt-get install chromium chromium-driver", pytrace=False)
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in FLAGS + (f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture
def server():
    server = ViewServer(**example.whole(example.THREE))
    yield server
    server.close()


@pytest.fixture
def page(driver, server):
    """A tab of its own: a token that an earlier test left belongs to a tab and a port, and ports come again."""
    first = driver.current_window_handle
    driver.switch_to.new_window("tab")
    page = Page(driver, server)
    page.emulate(1280)
    yield page.open()
    driver.close()
    driver.switch_to.window(first)


def test_it_shows_what_each_node_says_of_itself(page):
    page.enter()
    page.wait_text("carl", "#nodes")

    assert page.node("anna", ".says .badge") == ["installed", "whole"]
    assert page.node("anna", ".facts li") == [
        "Debian GNU/Linux 12 (bookworm)", "x86_64", "16 × AMD EPYC 7763", "AVX2", "glibc 2.36",
        "kernel 6.1.0-38-amd64", "Python 3.11.2"]
    assert page.node("bert", ".says .badge, .sentence, .hint") == ["missing", "libgomp.so.1 is missing",
                                                                   "apt-get install libgomp1"]
    assert page.node("carl", ".says .badge, .sentence") == [
        "downloading", "downloading llama-b10991-bin-ubuntu-x64.tar.gz (16 MB, 43 %)"]
    assert page.node("bert", ".thing") == page.node("carl", ".thing") == [f"llama.cpp {example.BUILD}"]
    bar = page.find("#nodes progress")
    assert (bar.get_attribute("value"), bar.get_attribute("max")) == ("43", "100")
    assert bar.get_attribute("aria-label") == f"llama.cpp {example.BUILD}: 43 %"


def test_it_says_of_a_model_where_it_runs_and_why_not(page):
    page.enter()
    page.wait_text("llama-3.3-70b", "#models")

    said = page.text("#models")
    assert "2 of 2 ready" in said and "0 of 2 ready" in said
    for model in example.models():
        for sentence in model.why_not:
            assert sentence in said
    assert [link.text for link in page.all("#models a")][:2] == ["anna", "frieda"]


def test_a_long_row_of_reasons_folds_and_loses_none(page, server):
    reasons = tuple(f"node{number}: it has no GPU" for number in range(30))
    server.views["models"] = (dataclasses.replace(example.models()[1], why_not=reasons),)
    page.enter()
    page.wait_text("24 more reasons", "#models")
    page.find("#models summary").send_keys(Keys.ENTER)

    page.wait_text(reasons[-1], "#models")
    assert [line.text for line in page.all("#models ul.why > li")] == list(reasons)


def test_it_follows_what_changes_and_keeps_what_a_person_opened(page, server):
    page.enter()
    page.wait_text("first failure on anna", "#replicas")
    page.find("#replicas summary").send_keys(Keys.ENTER)
    page.wait_text("missing tensor", "#replicas pre")
    page.script("document.querySelector('#nodes-table tbody').dataset.mark = 'the same element'")

    server.views["nodes"] = (example.GOOD, dataclasses.replace(example.LACKING, engines=(example.engine(),)),
                             example.FETCHING)
    page.wait(lambda: page.node("bert", ".says .badge") == ["installed"], "bert's engine")

    assert page.visible("#replicas pre") is not None
    assert page.driver.switch_to.active_element.tag_name == "summary"
    assert page.find("#nodes-table tbody").get_attribute("data-mark") == "the same element"


def test_a_refresh_that_brings_nothing_new_moves_nothing(page, server):
    page.enter()
    page.wait_text("carl", "#nodes")
    where = ("return [...document.querySelectorAll('td, th, h2, #summary a, #events-list li')].map(element => {"
             "const box = element.getBoundingClientRect(); return [box.x, box.y, box.width, box.height]})")
    before, asked = page.script(where), len(server.seen)
    page.wait(lambda: len(server.seen) >= asked + 10, "two more refreshes")

    assert page.script(where) == before


def test_names_and_output_are_text_and_harm_nothing(page, server):
    server.views.update(example.whole((example.GOOD, example.HOSTILE)))
    page.enter()
    page.wait_text(example.HOSTILE_NAME, "#nodes")
    page.find("#replicas summary").send_keys(Keys.ENTER)
    page.wait_text("<img src=x onerror=\"window.pwned=2\">", "#replicas pre")

    shown = page.text("#nodes")
    assert "<b onclick=alert(1)>run this</b>" in shown and "<img src=x onerror=window.pwned=3>" in shown
    assert "\u202e" not in page.text() and "\x1b" not in page.text() and "[31m" not in page.text()
    assert page.script("return window.pwned") is None
    assert page.script("return document.querySelectorAll('main script, main img, main b, main u, main i').length") == 0
    foreign = page.script("return [...document.querySelectorAll('main *')].flatMap(element => [...element.attributes])"
                          ".filter(one => one.name.startsWith('on') || /^javascript:/i.test(one.value))"
                          ".map(one => one.name)")
    assert foreign == []


def test_a_link_leads_to_a_node_of_any_name(page, server):
    server.views.update(example.whole((example.GOOD, example.HOSTILE)))
    page.enter()
    page.wait_text(example.HOSTILE_NAME, "#engines")
    next(link for link in page.all("#engines a") if link.text == example.HOSTILE_NAME).click()

    target = page.find("#nodes-table tbody:target")
    assert target.find_element(By.CSS_SELECTOR, "td.name bdi").text == example.HOSTILE_NAME


@pytest.mark.parametrize("token, said", [
    ("llmgw_viewer_wrong", "the token is not known here"),
    ("llmgw_node_test", "a token of role node does not open"),
    ("llmgw_infer_abc_def", "this is a key for using models"),
    ("zwei wörter", "a token is one word")])
def test_a_wrong_token_is_refused_with_a_sentence_and_asked_for_again(page, token, said):
    page.enter(token)
    page.wait_text(said, "#refused")

    assert page.visible("#ask") and not page.visible("#cluster")
    assert page.script("return sessionStorage.length") == 0
    page.enter()
    page.wait_text("anna", "#nodes")
    assert page.text("#refused") == ""


def test_a_token_that_is_revoked_closes_the_page_and_nothing_stays(page, server):
    page.enter()
    page.wait_text("anna", "#nodes")
    server.tokens.clear()
    page.wait_text("the token is not known here", "#refused")

    assert page.visible("#ask") and not page.visible("#cluster")
    assert page.script("return sessionStorage.length") == 0
    assert "anna" not in page.script("return document.body.textContent")


def test_it_keeps_what_it_has_while_the_server_is_gone_and_goes_on_when_it_is_back(page, server):
    page.enter()
    page.wait_text("anna", "#nodes")
    server.close()
    page.wait_text("the control plane does not answer", "#status")

    assert "shown as of" in page.text("#status")
    assert "anna" in page.text("#nodes") and page.visible("#cluster")
    assert page.find("#status-words").get_attribute("role") == "status"
    server.views["nodes"] = example.THREE + (example.ARM,)
    server.open()
    page.wait_text("ida", "#nodes")
    page.wait_text("up to date", "#status")
    assert "does not answer" not in page.text("#status")


def test_after_a_restart_with_another_history_the_old_events_are_gone(page, server):
    page.enter()
    page.wait_text("the control plane started with 3 models", "#events")
    server.close()
    page.wait_text("does not answer", "#status")
    server.views["events"] = (dataclasses.replace(example.events()[0], id=1, message="a new beginning"),)
    server.open()
    page.wait_text("a new beginning", "#events")

    assert len(page.all("#events-list li")) == 1


def test_events_come_newest_first_and_only_new_ones_are_asked_for(page, server):
    page.enter()
    page.wait_text("bert joined from 10.0.0.8", "#events")
    last = server.views["events"][-1]
    server.views["events"] += (dataclasses.replace(last, id=last.id + 1, message="something new"),)
    page.wait_text("something new", "#events")

    assert page.find("#events-list li .message").text == "something new"
    assert any(path.endswith("/events") and query.get("after") == str(last.id) for path, query, _ in server.seen)


def test_the_token_is_kept_by_the_tab_only_and_sent_as_bearer(page, server, driver):
    page.enter()
    page.wait_text("anna", "#nodes")
    driver.refresh()
    page.wait_text("anna", "#nodes")

    assert page.script("return {...sessionStorage}") == {"llmgw-token": TOKEN}
    assert page.script("return [localStorage.length, document.cookie]") == [0, ""]
    assert driver.get_cookies() == []
    assert TOKEN not in driver.current_url
    for _, _, headers in server.seen:
        assert headers["authorization"] == f"Bearer {TOKEN}" and "cookie" not in headers
    own = driver.current_window_handle
    driver.switch_to.new_window("tab")
    page.open()
    assert page.wait(lambda: page.visible("#token"), "another tab asks again")
    driver.close()
    driver.switch_to.window(own)


def test_the_token_can_be_forgotten(page):
    page.enter()
    page.wait_text("anna", "#nodes")
    page.find("#leave").click()

    assert page.visible("#token") and not page.visible("#cluster")
    assert page.script("return sessionStorage.length") == 0


def test_an_empty_cluster_says_what_to_do(page, server):
    server.views.update({name: () for name in server.views})
    page.enter()
    page.wait_text("no node has joined yet", "#nodes")

    assert f"llmgw.pyz agent --server {server.url} --token-file FILE" in page.text("#nodes")
    assert "no model is wanted yet: name one under models: in server.yaml" in page.text("#models")
    assert "nothing has happened yet" in page.text("#events")


def test_it_tells_what_concerns_the_whole_cluster(page, server):
    server.besides = {"models": {"config_problem": "server.yaml line 3: nonsense", "held": ["it stops 2 of 2 replicas"]},
                      "nodes": {"suspicion": "3 of 4 nodes fell silent at once"}}
    page.enter()

    page.wait_text("server.yaml line 3: nonsense", "#notices")
    page.wait_text("it stops 2 of 2 replicas", "#notices")
    page.wait_text("3 of 4 nodes fell silent at once", "#nodes-note")


def test_a_server_in_trouble_is_shown_with_its_own_words(page, server):
    page.enter()
    page.wait_text("anna", "#nodes")
    server.problem = TryAgain("the store is being restored", hint="try again in a moment")
    page.wait_text("the store is being restored (try again in a moment)", "#status")

    assert "anna" in page.text("#nodes")
    server.problem = None
    page.wait_text("up to date", "#status")


def test_only_the_nodes_that_need_attention_can_be_shown(page):
    page.enter()
    page.wait_text("need attention (1)", "#nodes")
    page.find("#nodes-some").send_keys(Keys.ENTER)

    assert [name.text for name in page.all("#nodes-table td.name bdi")] == ["bert"]
    assert page.find("#nodes-some").get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("width", [1920, 1280, 1081, 1080, 681, 375, 320])
def test_nothing_is_wider_than_the_window(page, server, width):
    server.views.update(example.whole(example.THREE + example.TROUBLED + (example.HOSTILE,)))
    page.emulate(width)
    page.enter()
    page.wait_text("ida", "#nodes")
    for summary in page.all("summary"):
        page.script("arguments[0].parentElement.open = true", summary)

    assert page.script("return document.documentElement.scrollWidth") <= width
    wide = page.script("return [...document.querySelectorAll('main *')].filter(element => element.offsetParent && "
                       "element.getBoundingClientRect().right > innerWidth + 0.5 && !element.closest('thead, pre'))"
                       ".map(element => element.outerHTML.slice(0, 200))")
    assert wide == []


def test_the_browser_finds_nothing_to_complain_about(page, server):
    page.driver.get_log("browser")
    server.views.update(example.whole(example.THREE + example.TROUBLED + (example.HOSTILE,)))
    page.enter()
    page.wait_text("ida", "#nodes")

    assert [entry for entry in page.driver.get_log("browser") if entry["level"] != "DEBUG"] == []
