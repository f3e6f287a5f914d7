"""The page in a real browser: it shows what the ledger says, follows a run, and can be linked, sorted and operated by keys."""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.attacks.score_rows import ScoreRecord
from fedgauge.server.dashboard.web import make_app
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.gallery import png
from fedgauge.server.views.leakage import leakage
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.cli.result_commands import leading_to
from fedgauge.simulations.reports.report import write_report
from tests.server.dashboard.pages import listening
from tests.small_runs import scores_of

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
expect = playwright.expect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")]

TOKEN = "secret"
HOSTILE = "<img src=x onerror=window.harmed=1><b>bold</b>"
WAIT = 60_000  # ms: what a page shows within 2 s may take long on a machine that has other things to do
LOST = "ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED_ENCODING|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE"

MakeRun = Callable[..., Run]
expect.set_options(timeout=WAIT)


# ------------------------------------------------------------------------------------------------ runs, server, browser


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, make_scenario: Callable[..., Scenario], make_taped: MakeRun
) -> Path:
    """Two complete runs with different chains."""
    root = tmp_path_factory.mktemp("watched")
    attack = [{"use": "inverting_gradients", "iterations": 40}]
    clipped = [{"use": "clip", "max_norm": 0.5}, {"use": "local_sgd", "rate": 0.1}]
    for name, changes in {"first": {"attack": attack}, "second": {"attack": attack, "chain": clipped}}.items():
        serve(make_taped(root / name, make_scenario(**changes), reason=HOSTILE), LocalExecutor())
    return root


@contextmanager
def serving(path: Path, port: int = 0, seen_by: "Watched | None" = None) -> Iterator[str]:
    """The page's server; gives its address. A page that sees it leaves it first, and so has nothing to say of its end."""
    with listening(make_app(path, TOKEN), port) as address:
        yield address
        if seen_by is not None:
            seen_by.page.goto("about:blank")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with serving(folder) as found:
        yield found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, what its console said, and where it asked."""

    page: Any
    told: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def open(self, address: str) -> Any:
        with_token = f"{address}{'&' if '?' in address else '?'}token={TOKEN}"  # as `fedgauge watch` prints it
        self.page.goto(with_token if address.startswith("http") else address)
        expect(self.page.locator("h1")).to_be_visible()
        return self.page


@pytest.fixture
def watched(chromium: Any) -> Iterator[Watched]:
    """A fresh page; in the end its console must be empty, and nothing may have been asked of elsewhere."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(WAIT)
    found = Watched(context.new_page())
    found.page.on("console", lambda message: found.told.append(f"{message.type}: {message.text}"))
    found.page.on("pageerror", lambda error: found.told.append(f"error: {error}"))
    found.page.on("request", lambda asked: found.asked.append(asked.url))
    yield found
    context.close()
    assert found.told == []
    assert [url for url in found.asked if not re.match(r"(http://127\.0\.0\.1:\d+/|data:|blob:|file:)", url)] == []


def column(page: Any, caption: str, number: int) -> list[str]:
    """The cells of a table's column, from the top."""
    rows = page.get_by_role("region", name=caption).locator("tbody tr")
    return [text.split("\n")[0] for text in rows.locator(f"td:nth-child({number})").all_inner_texts()]


def decibels(page: Any) -> list[float]:
    """The first PSNR of each card, in the cards' order."""
    first = "card => [...card.querySelectorAll('b')].map(b => b.textContent).find(words => words.endsWith(' dB'))"
    return [
        float(told.removesuffix(" dB"))
        for told in page.locator(".gallery .card").evaluate_all(f"all => all.map({first})")
    ]


# ------------------------------------------------------------------------------------------------------- finished runs


def test_a_finished_run_opens_with_its_numbers(watched: Watched, address: str, folder: Path) -> None:
    page = watched.open(f"{address}/run/first")
    expect(page.locator(".js-line").first).to_be_visible()
    with Run(folder / "first").ledger() as ledger:
        scores = scores_of(ledger)
        (leak,) = [k for k in leakage(scores, "psnr") if k.round is None and k.attack == "inverting_gradients"]
    with closing(RunSnapshot(Run(folder / "first"))) as reading, reading.now():
        expect(page.locator(".verdict p")).to_have_text(list(verdict_of(reading).sentences))
    expect(page.locator(".verdict + .worst .card img").first).to_be_visible()
    expect(page.locator(".worst .card")).to_have_count(3)
    kinds = column(page, "All rounds together", 2)
    assert (kinds[0], set(kinds[1:])) == ("attack", {"baseline"})
    row = page.get_by_role("region", name="All rounds together").locator("tbody tr").first
    assert leak.mean is not None and leak.best is not None
    expect(row.locator("td").nth(4)).to_have_text(f"{leak.mean:.1f}")
    expect(row.locator("td").nth(6)).to_have_text(f"{leak.best:.1f}")
    expect(page.locator("#live")).to_have_text("finished")
    assert page.locator(".plot").first.get_attribute("aria-label").startswith("Leakage and test accuracy")
    page.get_by_role("combobox", name="Leakage as").select_option("ssim")
    expect(page.locator(".ytitle").first).to_have_text("SSIM")
    assert page.url.endswith("?metric=ssim")


def test_a_legend_of_many_attacks_is_shown_whole_and_leaves_the_plot_its_height(watched: Watched, address: str) -> None:
    page = watched.open(f"{address}/run/first")
    expect(page.locator(".js-line").first).to_be_visible()
    drawn = page.evaluate(
        """count => {
            const node = document.body.appendChild(document.createElement("div"));
            const traces = Array.from({ length: count }, (_, k) => ({ x: [1, 2], y: [k, k], name: `attack ${k}` }));
            draw(node, traces, layout({}, {}, 320 + legendHeight(count)));
            const { legend, _size } = node._fullLayout;
            return [legend._effHeight >= legend._height, _size.h];
        }""",
        24,
    )
    assert drawn[0] and drawn[1] > 180


# -------------------------------------------------------------------------------------------------------------- gallery


def test_the_slider_goes_through_the_rounds_by_keys(watched: Watched, address: str, folder: Path) -> None:
    page = watched.open(f"{address}/run/first/gallery")
    expect(page.locator("output")).to_have_text("round 2")
    slider = page.get_by_role("slider", name="Round")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("output")).to_have_text("round 1")
    expect(page.locator(".gallery .card")).to_have_count(4)
    expect(page.locator(".meaning strong")).to_have_text("4 examples in round 1.")
    expect(slider).to_be_focused()
    assert page.url.endswith("?round=1")
    federation, shown = Run(folder / "first").scenario().federation, {}
    for card in page.locator(".gallery .card").all():
        client, example = re.match(r"client (\d+) · round 1 · example (\d+)", card.locator("h3").inner_text()).groups()  # type: ignore[union-attr]
        shown[int(client), int(example)] = card.locator("img").first.get_attribute("src")
    for (client, example), source in shown.items():
        assert source == png(federation.batch_at(client, 1).x[example])
    assert sorted(shown) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    page.get_by_label("all rounds").check()
    expect(page.locator(".gallery .card")).to_have_count(8)
    page.get_by_role("combobox", name="Client").select_option("1")
    expect(page.locator(".gallery .card")).to_have_count(4)


# --------------------------------------------------------------------------------------------------- clients, comparison


def test_the_clients_table_sorts_and_leads_to_a_clients_images(watched: Watched, address: str) -> None:
    page = watched.open(f"{address}/run/first/clients")
    assert column(page, "Clients, PSNR (dB)", 1)[-1] == "client 2", "who was never attacked comes last"
    head = page.get_by_role("button", name="mean")
    head.focus()
    page.keyboard.press("Enter")
    expect(page.locator("th[aria-sort=descending]")).to_have_text(re.compile("mean"))
    down = column(page, "Clients, PSNR (dB)", 3)
    page.keyboard.press("Enter")
    expect(page.locator("th[aria-sort=ascending]")).to_have_text(re.compile("mean"))
    up = column(page, "Clients, PSNR (dB)", 3)
    assert down[:2] == up[:2][::-1] and down[2] == up[2] == "–", "no value comes last, whichever way"
    page.get_by_role("link", name="client 1").click()
    expect(page.locator(".gallery .card")).to_have_count(4)
    assert "client=1" in page.url


def test_the_file_that_the_browser_gets_leads_to_the_page(watched: Watched, address: str, tmp_path: Path) -> None:
    """From another site, as a file is: a cookie that is sent to the page's own links only would not let in."""
    (tmp_path / "open.html").write_text(leading_to(f"{address}/?token={TOKEN}"))
    page = watched.page
    page.goto((tmp_path / "open.html").as_uri())
    expect(page.locator(".run")).to_have_count(2)
    assert page.url == f"{address}/"


def test_runs_are_compared_and_chosen(watched: Watched, address: str) -> None:
    page = watched.open(f"{address}/compare")
    rows = page.get_by_role("region", name="Every attack on every run").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(page.get_by_role("region", name="Settings that differ")).to_contain_text("max_norm")
    page.get_by_role("button", name="mean").click()
    means = [float(text.removesuffix(" dB")) for text in column(page, "Every attack on every run", 4)]
    assert means == sorted(means, reverse=True)
    page.get_by_role("checkbox", name="second").uncheck()
    expect(rows).to_have_count(1)
    assert "runs=first" in page.url
    page.reload()
    expect(rows).to_have_count(1)


def test_links_lead_somewhere_and_back(watched: Watched, address: str) -> None:
    page = watched.open(f"{address}/run/first/gallery?round=1&client=1")
    expect(page.locator(".gallery .card")).to_have_count(2)
    expect(page.get_by_role("combobox", name="Client")).to_have_value("1")
    page.get_by_role("link", name="Clients").click()
    expect(page.locator("h1")).to_have_text("Who leaks most")
    expect(page.get_by_role("link", name="Clients")).to_have_attribute("aria-current", "page")
    page.go_back()
    expect(page.locator(".gallery .card")).to_have_count(2)
    page.go_forward()
    expect(page.locator("h1")).to_have_text("Who leaks most")
    page.get_by_role("link", name="fedgauge").click()
    expect(page.locator(".run")).to_have_count(2)
    page.get_by_role("searchbox", name="Find").press_sequentially("CLIP sec")
    expect(page.locator(".run")).to_have_count(1)
    expect(page.get_by_role("searchbox", name="Find")).to_be_focused()
    page.get_by_label("failed only").check()
    expect(page.locator(".run")).to_have_count(0)
    page.reload()
    expect(page.get_by_role("searchbox", name="Find")).to_have_value("CLIP sec")
    page.get_by_label("failed only").uncheck()
    page.get_by_role("link", name="second").click()
    expect(page.locator("h1")).to_have_text("second")


# ------------------------------------------------------------------------------------------------------------------ live


@pytest.fixture
def training(tmp_path: Path, make_scenario: Callable[..., Scenario], make_taped: MakeRun) -> Iterator[Run]:
    """A run at work: two rounds trained of twenty, nothing attacked yet."""
    run = make_taped(tmp_path / "runs" / "working", make_scenario(rounds=20))
    with run.lock("training"):
        yield run


def attack_once(run: Run, decibel: float) -> None:
    """The next wave's scores, as the attack service writes them."""
    with run.ledger() as ledger:
        lease = ledger.lease()
        assert lease is not None
        ledger.finish(
            lease,
            {
                c: [
                    ScoreRecord(lease.round, c, lease.attack.name, e, "psnr", decibel, "converged", 0.1)
                    for e in range(2)
                ]
                for c in lease.clients
            },
        )


def test_rows_appear_without_reload(
    watched: Watched, training: Run, record_property: Callable[[str, object], None]
) -> None:
    with serving(training.folder.parent, seen_by=watched) as address:
        page = watched.open(f"{address}/run/working")
        expect(page.locator("#live")).to_have_text("live")
        expect(page.get_by_text("There are no scores yet; they will appear")).to_be_visible()
        page.evaluate("window.same = true")
        page.get_by_text("Scenario", exact=True).click()
        page.get_by_text("Scenario", exact=True).focus()
        seconds = []
        for decibel in (21.5, 33.5):
            written = time.monotonic()
            attack_once(training, decibel)
            expect(page.get_by_role("region", name="All rounds together")).to_contain_text(f"{decibel}")
            seconds.append(time.monotonic() - written)
        record_property("seconds_until_shown", seconds)
        with training.ledger() as ledger:
            ledger.record_round(3, 0.55, 1.0, 1.0)
        expect(page.locator(".strip")).to_contain_text("round 3 of 20 · accuracy 55")
        assert page.evaluate("window.same"), "the page was not loaded again"
        expect(page.locator("details").first).to_have_attribute("open", "")
        expect(page.get_by_text("Scenario", exact=True)).to_be_focused()


@pytest.mark.full
def test_a_lost_connection_is_shown_and_restored(watched: Watched, training: Run) -> None:
    with serving(training.folder.parent) as address:
        page = watched.open(f"{address}/run/working")
        expect(page.locator("#live")).to_have_text("live")
    expect(page.locator("#live")).to_have_text("connection lost, trying again")
    attack_once(training, 25.5)
    expect(page.locator(".verdict")).to_be_visible()
    with serving(training.folder.parent, int(address.rsplit(":", 1)[1]), watched):
        expect(page.get_by_role("region", name="All rounds together")).to_contain_text("25.5")
        expect(page.locator("#live")).to_have_text("live")
    watched.told[:] = [words for words in watched.told if not re.search(LOST, words)]


# ----------------------------------------------------------------------------------------------- others' words, and text


@pytest.fixture
def hostile(tmp_path: Path, make_scenario: Callable[..., Scenario]) -> Run:
    """A run with markup wherever others can write."""
    run = Run.create(tmp_path / "runs" / "hostile", make_scenario(attack=[]))
    plan = AttackPlan((PlannedAttack(HOSTILE, {"use": "analytic"}, auxiliary={HOSTILE: HOSTILE}),))
    with run.ledger() as ledger:
        ledger.add_attacks(plan, {HOSTILE: f"honest; {HOSTILE}"})
        ledger.record_round(0, 0.1, 2.3, 0.1)
        ledger.record_intake(
            1, [Participation(0, "accepted", "", 2, "digest"), Participation(1, "rejected", HOSTILE)], plan
        )
        ledger.record_round(1, 0.2, 2.3, 0.1)
        ledger.set_meta(replay="mismatch", replay_detail=HOSTILE)
    attack_once(run, 30.5)
    return run


def test_foreign_text_is_never_executed(watched: Watched, hostile: Run) -> None:
    with serving(hostile.folder.parent, seen_by=watched) as address:
        for path in ("/", "/run/hostile", "/run/hostile/gallery", "/compare"):
            page = watched.open(address + path)
            page.wait_for_load_state("load")
            expect(page.locator("main")).to_contain_text(HOSTILE)
            assert page.evaluate("window.harmed") is None
            assert page.locator("main b:text-is('bold'), main img[src='x']").count() == 0, path


# ---------------------------------------------------------------------------------------------------------------- report


def test_a_report_opened_from_its_file_draws(watched: Watched, folder: Path) -> None:
    path = write_report(Run(folder / "first"))
    page = watched.open(path.resolve().as_uri())
    expect(page.locator(".js-line").first).to_be_visible()
    expect(page.locator(".gallery .card")).to_have_count(4)
    page.get_by_role("slider", name="Round").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".meaning strong")).to_have_text("4 examples in round 1.")
    page.get_by_label("all rounds").check()
    worst_first = decibels(page)
    assert len(worst_first) == 8 and worst_first == sorted(worst_first, reverse=True)
    page.get_by_role("combobox", name="Client").select_option("1")
    expect(page.locator(".gallery .card")).to_have_count(4)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    expect(page.locator(".gallery .card")).to_have_count(8)
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    expect(page.locator(".gallery .card")).to_have_count(4)


def test_a_reports_words_run_nothing(watched: Watched, hostile: Run) -> None:
    page = watched.open(write_report(hostile).resolve().as_uri())
    expect(page.locator(".js-plotly-plot").first).to_be_visible()
    expect(page.locator("main")).to_contain_text(HOSTILE)
    assert page.evaluate("window.harmed") is None
    assert page.locator("main b:text-is('bold'), main img[src='x']").count() == 0
