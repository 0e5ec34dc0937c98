"""The page of a run, as a browser reads it."""

from __future__ import annotations

import math
import re
from pathlib import Path

from gradtrack import __version__
from gradtrack.delivery.run_files import RunEnd, note_files
from gradtrack.pages import html
from gradtrack.pages.html import tables_of
from gradtrack.reports import IssueType, NanInfSummary, ParameterStatistics, StepReport, TrainingSummary
from tests.pages.pages import Page
from tests.pages.runs import HOSTILE, gather, issue, row


def parameter(norm: float = 1.0) -> ParameterStatistics:
    """Return the statistics of a parameter."""
    return ParameterStatistics(
        norm=norm, mean=0.125, variance=0.0, min=-1.0, max=1.0, zero_fraction=0.5, element_count=4, group="encoder"
    )


def ended(**parameters: ParameterStatistics) -> RunEnd:
    """Return the end of a run."""
    summary = TrainingSummary(total_steps=1234, nan_inf_summary=NanInfSummary(skipped_steps=3))
    report = StepReport(step=1234, parameters=parameters)
    return RunEnd(run_id="a-run", summary=summary, last=[report], flight_recorder=[report])


def test_page_shows_everything_that_is_known() -> None:
    """Issues with cause and advice, numbers, tables, settings and versions are all on the page."""
    sick = issue("encoder.weight").model_copy(update={"explained_by": "LR_TOO_HIGH"})
    run = gather(row(1), row(2, issues=[sick]), max_grad_norm=0.625)
    run.end = ended(weight=parameter(0.8125))
    text = Page(html.render(run)).text
    for expected in ("Run a-run", "1,234", "1 open issue", "HIGH", "EXPLODING", "encoder.weight", "LR_TOO_HIGH"):
        assert expected in text
    for expected in ("Lower the learning rate.", "from step 2", "jump 50, limit 10", "max_grad_norm", "0.625"):
        assert expected in text
    for expected in ("W_in", "0.8125", "encoder", "Flight recorder", "Parameters", f"gradtrack {__version__}"):
        assert expected in text


def test_a_loss_that_never_was_a_number_is_told() -> None:
    """A run whose loss was NaN throughout has a tile and a chart that say so; one without a loss has neither."""
    page = Page(html.render(gather(row(1, loss=math.nan), row(2, loss=math.nan))))
    assert "never a number" in page.text
    assert page.chart("Loss")["lines"][0]["lost"] == [1, 2]
    silent = Page(html.render(gather(row(1, loss=None))))
    assert "never a number" not in silent.text
    assert "Loss" not in [chart["title"] for chart in silent.charts]


def test_a_parameter_without_a_finite_element_has_no_statistics() -> None:
    """Its norm over nothing is not a zero."""
    run = gather(row(1))
    run.end = ended(
        weight=parameter().model_copy(update={"norm": 0.0, "nan_count": 3, "inf_count": 1}), bias=parameter()
    )
    table = next(table for table in tables_of(run) if table.id == "parameters0")
    assert list(table.rows[0][2:7]) == ["–"] * 5
    assert table.rows[1][2] == "1"


def test_groups_that_ended_without_a_gradient_tell_their_step() -> None:
    """A group whose last gradients were not finite keeps the numbers of its last step that had one, and names it."""
    bad = {"train/grad_norm/W_in": 0.0, "train/grad_mean/W_in": math.nan, "train/grad_norm/W_out": 3.0}
    run = gather(
        row(1), row(2, metrics={"train/grad_norm/W_in": 1.2, "train/grad_mean/W_in": 0.5}), row(3, metrics=bad)
    )
    (table,) = tables_of(run)
    assert table.columns[-1] == "step"
    assert list(table.rows) == [["W_in", "1.2", "–", "0.5", "–", "2"], ["W_out", "3", "1.0000", "–", "–", "3"]]
    (usual,) = tables_of(gather(row(1), row(2)))
    assert "step" not in usual.columns


def test_parameter_table_can_be_searched() -> None:
    """There is a search field for the table of the parameters, and a row for each of them."""
    run = gather(row(1))
    run.end = ended(**{f"layer{index}": parameter() for index in range(50)})
    page = Page(html.render(run))
    (search,) = [attributes for tag, attributes in page.tags if tag == "input"]
    assert search["data-table"] in [attributes.get("id") for tag, attributes in page.tags if tag == "table"]
    assert all(f"layer{index}" in page.texts for index in range(50))


def test_marks_in_the_charts_are_the_numbers_of_the_cards() -> None:
    """An issue has a number on its card, which its marks in the charts carry."""
    later = issue("head", IssueType.DISCONNECTED)
    page = Page(html.render(gather(row(1), row(2, issues=[issue("encoder")]), row(3, issues=[later]))))
    numbers = [attributes for tag, attributes in page.tags if attributes.get("class") == "number" and tag == "span"]
    assert len(numbers) == 2
    assert [event[2] for event in page.chart("Loss")["events"]] == [2, 1]


def test_a_killed_run_says_what_to_do() -> None:
    """A run that has no end is no news of a training that goes on, and what its trackers miss can be delivered."""
    run = gather(row(1))
    text = Page(html.render(run)).text
    assert "healthy when last seen" in text
    assert "gradtrack replay delivers what its trackers are missing" in text
    run.is_running = True
    assert "when last seen" not in Page(html.render(run)).text
    run.is_running, run.end = False, ended()
    for failed, words in ((False, "ended"), (True, "The training raised an error.")):
        run.end = ended().model_copy(update={"failed": failed})
        text = Page(html.render(run)).text
        assert words in text
        assert "when last seen" not in text
        assert ("raised" in text) == failed


def test_pairs_have_their_numbers_apart() -> None:
    """Those of the whole run stand first, then those of each pair under its name."""
    page = Page(html.render(gather(row(1, source="gen"), row(1, source="critic"))))
    labels = [name for tag, attributes in page.tags if tag == "section" and (name := attributes.get("aria-label"))]
    assert labels == ["Summary", "Summary of gen", "Summary of critic"]
    assert page.texts.count("Loss") == 2


def test_an_effect_is_folded_below_its_cause() -> None:
    """A consequence is on the card of its root cause, and says that its advice is for afterwards."""
    effect = issue("head").model_copy(update={"explained_by": "EXPLODING:encoder"})
    page = Page(html.render(gather(row(1, issues=[effect, issue("encoder")]))))
    cards = {attributes["id"]: attributes["class"] for tag, attributes in page.tags if tag == "article"}
    assert cards == {"issue1": "issue high"}
    assert "Followed by EXPLODING at head" in page.text
    assert page.text.count("What to do:") == page.text.count("If it stays without that:") == 1


def test_charts_come_before_a_long_list_of_issues() -> None:
    """The first three open episodes are shown, and the others and those that are over are folded."""
    kinds = [IssueType.DISCONNECTED, IssueType.DEAD, IssueType.STALE_GRAD, IssueType.HEAD_REDUNDANCY]
    found = [issue(kind.value, kind) for kind in kinds]
    text = html.render(gather(row(1, issues=[*found, issue("old", IssueType.ROTATION)]), row(2, issues=found)))
    folded = text[text.index("1 more that is open") :]
    assert [f'id="issue{number}"' in folded for number in (1, 2, 3, 4, 5)] == [False, False, False, True, True]
    assert 'id="issue5"' in folded[folded.index("1 closed") :]


def test_a_closed_issue_is_told_from_an_open_one() -> None:
    """What is over does not look as urgent as what is not."""
    old = issue("old", IssueType.DISCONNECTED)
    page = Page(html.render(gather(row(1, issues=[old, issue("new")]), row(2, issues=[issue("new")]))))
    looks = [attributes["class"] for tag, attributes in page.tags if tag == "article"]
    assert looks == ["issue high", "issue high closed"]


def test_columns_of_words_are_told_from_numbers() -> None:
    """Words stand on the left of their column and numbers on the right."""
    run = gather(row(1))
    run.end = ended(weight=parameter(), bias=parameter())
    page = Page(html.render(run))
    assert [attributes.get("class") for tag, attributes in page.tags if tag == "td"].count("word") >= 2


def test_a_healthy_run_says_so() -> None:
    """No news is told as well."""
    text = Page(html.render(gather(row(1)))).text
    assert "healthy" in text
    assert "No issue opened in this run." in text


def test_case_25_hostile_names_are_text() -> None:
    """A name that looks like markup is shown, not obeyed, wherever it comes from."""
    sick = issue(HOSTILE).model_copy(update={"message": HOSTILE, "recommendation": HOSTILE, "explained_by": HOSTILE})
    metrics = {f"train/grad_norm/{HOSTILE}": 1.0, f"rnn/{HOSTILE}": 1.0}
    run = gather(row(1, metrics=metrics, issues=[sick]), **{HOSTILE: HOSTILE})  # type: ignore[arg-type]
    run.end = ended(**{HOSTILE: parameter()})
    page = Page(html.render(run))
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert page.texts.count(HOSTILE) >= 5
    assert not any("alert" in (value or "") for _, attributes in page.tags for value in attributes.values())
    assert any(HOSTILE in line["name"] for chart in page.charts for line in chart.get("lines", ()))


def test_data_cannot_leave_its_script_element() -> None:
    """Not one angle bracket of the data is in the page as such."""
    run = gather(row(1, metrics={"rnn/</script><!--": 1.0}))
    text = html.render(run)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert not set("<>&") & set(data[1])
    assert Page(text).chart("</script><!--")


def test_page_needs_no_network() -> None:
    """Nothing on the page refers to another place, and its policy forbids it."""
    text = html.render(gather(row(1, issues=[issue()])))
    page = Page(text)
    assert not [name for _, attributes in page.tags for name in attributes if name in ("src", "action")]
    assert all((attributes.get("href") or "#").startswith("#") for _, attributes in page.tags)
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttpRequest|import\(", text)
    (policy,) = [attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes]
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_pictures_of_what_no_chart_shows_are_inside_of_the_page(tmp_path: Path) -> None:
    """The run's own spectrum, gains and attention are on the page; neither other pictures nor another run's are."""
    for name in ("recurrent_spectrum.png", "gradient_gain.critic.png", "training_curves.png", "attention_entropy.png"):
        (tmp_path / name).write_bytes(b"a picture")
    names = ("recurrent_spectrum.png", "gradient_gain.critic.png", "training_curves.png", "gone.png")
    note_files(tmp_path, "a-run", [tmp_path / name for name in names])
    path = html.write_html_report(gather(row(1), directory=tmp_path))
    shown = [attributes for tag, attributes in Page(path.read_text(encoding="utf-8")).tags if tag == "img"]
    assert [found["alt"] for found in shown] == [
        "Eigenvalues on the unit circle, decay back in time",
        "The gain from block to block (critic)",
    ]
    assert {found["src"] for found in shown} == {"data:image/png;base64,YSBwaWN0dXJl"}
    note_files(tmp_path, "another-run", [tmp_path / name for name in names])
    assert "<img" not in html.write_html_report(gather(row(1), directory=tmp_path)).read_text(encoding="utf-8")


def test_page_with_large_pictures_stays_small(tmp_path: Path) -> None:
    """As many pictures are taken as there is room for."""
    names = [f"gradient_gain.pair{index}.png" for index in range(9)]
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 100_000)
    path = html.write_html_report(gather(row(1), directory=tmp_path), pictures=[tmp_path / name for name in names])
    assert path.stat().st_size < 1_000_000
    assert path.read_text(encoding="utf-8").count("<img") == 6


def test_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    """Ten thousand steps with many groups and a thousand parameters stay under two million bytes."""
    groups = {f"train/grad_norm/encoder.layers.{index}": 0.1 * index for index in range(60)}
    rows = [row(step, metrics={"train/grad_norm": step % 17 + 0.123456789, **groups}) for step in range(1, 10_001)]
    run = gather(*rows)
    run.end = ended(**{f"encoder.layers.{index}.attention.weight": parameter(0.1) for index in range(1000)})
    path = html.write_html_report(run, tmp_path / "page.html")
    assert path.stat().st_size < 2_000_000
    assert "encoder.layers.999.attention.weight" in path.read_text(encoding="utf-8")


def test_page_goes_into_the_directory_of_the_run(tmp_path: Path) -> None:
    """Without another path the page is the report of the directory."""
    assert html.write_html_report(gather(row(1), directory=tmp_path)) == tmp_path / "report.html"


def test_numbers_that_are_not_of_the_last_row_name_their_step() -> None:
    """Where loss and norm end as NaN, the tiles say so and what came before; where they do not, they say nothing."""
    nan = float("nan")
    text = Page(html.render(gather(row(1), row(2, norm=4.0), row(3, loss=nan, norm=nan)))).text
    assert "Loss NaN 0.5 at step 2, no number since" in text
    assert "Gradient norm NaN 4 at step 2, no number since" in text
    assert "no number since" not in Page(html.render(gather(row(1, loss=nan, norm=nan), row(2)))).text
