"""Claims about the pages of a run on text: sentences stand where images would, marked, by their own measure, and nothing fails."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.modality.sentences import SentenceModality
from fedgauge.client.components import allowing
from fedgauge.client.data.corpora import Text
from fedgauge.server.dashboard.web import make_app
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.figures import rounds_figures
from fedgauge.server.views.gallery import Gallery
from fedgauge.server.views.leak_tables import rounds_table
from fedgauge.server.views.snapshot import RunSnapshot, read_once
from fedgauge.server.views.tables import in_json
from fedgauge.simulations.reports.report import write_report
from tests.server.dashboard.pages import Http
from tests.small_runs import LedgerAlone, scores_of, verdict_on

pytest.importorskip("transformers", reason="the extra [text] is not installed")
pytest.importorskip("rouge_score", reason="the extra [text] is not installed")

OWN = '''
from dataclasses import dataclass
from fedgauge.attacks.base import Attack, Reconstruction

@dataclass(frozen=True)
class copies(Attack):
    """Auxiliary sentences as they are."""
    def reconstruct(self, wave, known, budget, streams):
        return [Reconstruction(known.auxiliary.x[: known.batch_size], None, 0.0, 1, 0.0, "converged") for _ in wave.clients]
'''


@pytest.fixture(scope="module", params=["classification", "next_token"])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, make_taped: Callable[..., Run]
) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("text")
    (folder / "mypages.py").write_text(OWN)
    decoder = request.param == "next_token"
    tables: dict[str, Any] = {
        "seed": 1,
        "rounds": 2,
        "clients": 3,
        "data": {"use": "phrases", "batch_size": 2, "auxiliary": 100, "task": request.param},
        "model": {
            "use": "tiny_gpt2" if decoder else "tiny_bert",
            "width": 16,
            "heads": 2,
        },
        "chain": [{"use": "local_sgd", "rate": 0.1}],
        "attack": [{"use": "mypages:copies"}],
        "audit": {"executor": "local"},
    }
    if decoder:
        tables["loss"] = {"use": "next_token"}
    with allowing(["mypages"], [folder]):
        made = make_taped(folder / "run", Scenario.from_tables(tables))
        serve(made, LocalExecutor())
        yield made


def test_the_gallery_shows_sentences_with_their_words_marked(run: Run) -> None:
    with closing(RunSnapshot(run)) as reading, reading.now():
        gallery = Gallery(reading)
        page = in_json(gallery.page())
        federation = reading.scenario.federation
    data = federation.shards.dataset
    assert gallery.modality is not None and isinstance(data, Text)
    assert (page["kind"], page["total"]) == ("text", 2 * 2 * 2)
    best = 0.0
    for card in page["cards"]:
        truth = federation.batch_at(card["client"], card["round"]).x[card["example"]]
        assert card["truth"] is None
        assert list(card["truth_words"]) == data.tokenizer.tokens(truth[truth != data.tokenizer.pad].tolist())
        (tile,) = card["tiles"]
        assert tile["attack"] == "copies" and tile["image"] is None and tile["note"].endswith(" %")
        right = {word for word, mark in tile["words"] if mark == "right"}
        assert right <= set(card["truth_words"])
        best = max(best, tile["value"])
    assert page["cards"][0]["tiles"][0]["value"] == best
    json.dumps(page)


def test_a_word_is_right_misplaced_as_often_as_the_truth_has_it_or_wrong(run: Run) -> None:
    data = run.scenario().federation.shards.dataset
    a, b, c, d = range(10, 14)
    truth, guess = torch.tensor([a, b, c, b, 0, 0]), torch.tensor([a, c, b, d, b, b])
    marks = [mark for _, mark in modality_of(data).marked(guess, truth)]
    assert marks == ["right", "misplaced", "misplaced", "wrong", "misplaced", "wrong"]
    assert {mark for _, mark in modality_of(data).marked(guess, None)} == {"wrong"}
    assert len(modality_of(data).words(truth)) == 4


def test_the_verdict_compares_by_rouge_with_the_floor_of_text(run: Run) -> None:
    with run.ledger() as ledger:
        measure = scores_of(ledger).measure
        found, lines = verdict_on(ledger), rounds_table(LedgerAlone(ledger)).records
    assert measure == SentenceModality.main
    assert "% ROUGE-1 on average" in found.sentence and "sentences" in found.sentence and "dB" not in found.sentence
    assert found.strongest is not None
    assert found.strongest.baseline in ("random_words", "wrong_client(copies)")
    assert all(line["attack"] == "copies" and line["baseline"] is not None for line in lines)


def test_the_report_and_its_figures_are_written(run: Run) -> None:
    told = write_report(run).read_text()
    assert "mean ROUGE-1" in told and "Private sentences" in told
    assert not any(
        of_images in told for of_images in ("mean PSNR", "Success over thresholds", "another client's images")
    )
    assert "another client's sentences" in told
    with read_once(run) as reading:
        names = {figure.name for figure in rounds_figures(reading)}
    assert {"leakage-rouge1", "leakage-exact"} <= names and not any("psnr" in name for name in names)


def test_the_page_answers_every_question(run: Run) -> None:
    get = Http(make_app(run.folder), "http://localhost").get
    api = f"/api/runs/{run.name}"
    overview = get(f"{api}/overview")
    assert overview.status_code == 200 and overview.json()["measure"]["metric"] == "rouge1"
    assert {row[0] for row in overview.json()["summary"]["rows"]} == {"copies", "random_words", "wrong_client(copies)"}
    for question in ("gallery", "gallery?round=all", "clients"):
        assert get(f"{api}/{question}").status_code == 200, question
