"""A run as JSON for scripts and agents: documents with a published schema, a bound, and what matters first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, Field

from gradtrack.pages.issues import IssueHistory
from gradtrack.pages.paths import ways_to_open
from gradtrack.pages.run_data import LOSS, RunData, Track
from gradtrack.reports.step import spell

MOST_BYTES: Final = 64 * 1024
_LEAST_BYTES: Final = 2 * 1024
_MARGIN: Final = 512
"""Room for what is said of that which was left out."""
_LONGEST_TEXT: Final = 1000
_WORDS: Final = frozenset({"NaN", "Infinity", "-Infinity"})

Number = int | float | Literal["NaN", "Infinity", "-Infinity"]


class Finding(BaseModel, frozen=True):
    """An issue as it stood at one step: what, where, how it was measured and what to do about it."""

    issue_type: str = Field(description="The kind of fault, such as VANISHING.")
    severity: str = Field(description="INFO, LOW, MEDIUM, HIGH or CRITICAL.")
    layer: str = Field(default="", description="Where it is; empty for the whole run.")
    message: str = Field(default="", description="What was found.")
    statistic: str = Field(default="", description="What was measured.")
    value: Number | None = Field(default=None, description="The value that was measured.")
    threshold: Number | None = Field(default=None, description="The limit that it crossed.")
    window: Number | None = Field(default=None, description="Over how many steps.")
    step: Number | None = Field(default=None, description="The step of the measurement.")
    explained_by: str | None = Field(default=None, description="The issue that is its cause, as TYPE:layer.")
    confidence: Number | None = Field(default=None, description="Between 0 and 1.")
    recommendation: str = Field(default="", description="What to do about it.")

    @classmethod
    def of(cls, issue: Mapping[str, Any], **more: Any) -> Self:
        """Take an issue from a journal, which may hold anything."""
        known: dict[str, Any] = {}
        for name, field in Finding.model_fields.items():
            value = issue.get(name)
            if field.annotation is str:
                known[name] = _text(value)
            elif name == "explained_by":
                known[name] = _text(value) or None
            else:
                known[name] = _number(value)
        return cls(**known, **more)


class IssueDocument(Finding, frozen=True):
    """An issue of a run at its worst, with the steps between which it was open."""

    source: str = Field(description="The (model, optimizer) pair; empty for the only one.")
    open: bool = Field(description="Whether it was open at the end.")
    spans: list[tuple[int, int | None]] = Field(description="From which step to which; null is an end not reached.")
    worst_step: int = Field(description="The step at which it was as told here.")
    first: Finding | None = Field(description="As it opened; null where it was left out.")
    last: Finding | None = Field(description="As it was last told; null where it was left out.")
    episode: int = Field(description="The number of the cause that it belongs to; the cause comes first within it.")


class _Document(BaseModel, frozen=True):
    """What every document tells."""

    format: Literal[1] = Field(default=1, description="The version of this document.")
    state: str = Field(description="running, ended, failed, interrupted or stopped without an end.")
    steps: int = Field(description="How many optimizer steps were taken, as far as is known.")
    healthy: bool = Field(description="Whether no issue of MEDIUM or above was open at the end.")
    left_out: dict[str, int] = Field(description="How many entries of each part the bound of 64 KB has cost.")
    issues: list[IssueDocument] = Field(description="The open ones first, each cause before what followed from it.")


class RunDocument(_Document, frozen=True):
    """What `gradtrack show --json` prints of a run; a list of these for several."""

    run_id: str = Field(description="The identity of the run.")
    run_dir: str = Field(description="Where its files are.")
    caveats: list[str] = Field(description="What its numbers do not show, and why.")
    resumed: dict[str, list[int]] = Field(description="After which steps of each pair the training was resumed.")
    last: dict[str, dict[str, Number]] = Field(description="For each pair the last recorded value of every metric.")
    files: list[str] = Field(description="The files that are meant to be read.")
    summary: dict[str, Any] | None = Field(description="The summary from the end of the run; null without one.")


class ReportDocument(_Document, frozen=True):
    """What `gradtrack report --json` prints: where the page is, and the verdict on the run."""

    run: str = Field(description="The identity of the run.")
    report: str = Field(description="The path of the page.")


DOCUMENTS: Final[dict[str, type[BaseModel]]] = {"show": RunDocument, "report": ReportDocument}
_ORDER: Final = (
    *("format", "run", "run_id", "run_dir", "report", "state", "steps", "healthy", "left_out"),
    *("issues", "caveats", "resumed", "last", "files", "summary"),
)


def show_document(run: RunData, *, share: int = 1) -> dict[str, Any]:
    """Return a run as plain data for scripts; of several runs each has its share of the bytes."""
    document = RunDocument(
        **_common(run),
        run_id=_text(run.run.run_id),
        run_dir=str(run.directory),
        caveats=[_text(caveat) for caveat in run.caveats],
        resumed=run.resumed,
        last={name: _last(track) for name, track in run.tracks.items()},
        files=[str(path) for path, _ in ways_to_open(run.directory)],
        summary=None if run.end is None else run.end.summary.model_dump(mode="json"),
    )
    return _bounded(document, max(MOST_BYTES // share, _LEAST_BYTES))


def report_document(run: RunData, path: Path) -> dict[str, Any]:
    """Return where the page of a run is, with the verdict."""
    return _bounded(ReportDocument(**_common(run), run=_text(run.run.run_id), report=str(path)), MOST_BYTES)


def issue_documents(run: RunData) -> list[IssueDocument]:
    """Return the issues of a run: those that are open first, each cause before what followed from it."""
    found = [
        _document_of(issue, number)
        for number, episode in enumerate(run.episodes, 1)
        for issue in (episode.cause, *episode.effects)
    ]
    return sorted(found, key=lambda issue: not issue.open)


def schema_of(name: str) -> str:
    """Return the JSON schema of a document as text."""
    found = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **DOCUMENTS[name].model_json_schema(mode="serialization"),
    }
    return json.dumps(found, indent=1) + "\n"


def _common(run: RunData) -> dict[str, Any]:
    found = {"state": run.state, "steps": run.total_steps, "healthy": run.healthy}
    return {**found, "left_out": {}, "issues": issue_documents(run)}


def _document_of(issue: IssueHistory, episode: int) -> IssueDocument:
    return IssueDocument.of(
        issue.worst,
        source=_text(issue.source),
        open=issue.is_open,
        spans=issue.spans,
        worst_step=issue.worst_step,
        first=Finding.of(issue.first),
        last=Finding.of(issue.last),
        episode=episode,
    )


def _last(track: Track) -> dict[str, Any]:
    """Return the last recorded values without those that never were, those of groups and layers last."""
    steps = {"step": int(track.steps[-1])} if len(track.steps) else {}
    names = sorted(track.names, key=lambda name: name.count("/") > 1)
    values = {"loss": track.last(LOSS), **{name: track.last(name) for name in names}}
    return {**steps, **{name: spell(value) for name, value in values.items() if value is not None}}


def _text(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 4]} ..."


def _number(value: object) -> Any:
    if isinstance(value, (int, float)) or (isinstance(value, str) and value in _WORDS):
        return spell(value)
    return None


def _bounded(document: BaseModel, most_bytes: int) -> dict[str, Any]:
    """Return a document as plain data of so many bytes at most, without its least important entries."""
    plain = spell(document.model_dump(mode="python"))
    plain = {name: plain[name] for name in _ORDER if name in plain}
    left_out: dict[str, int] = {}
    for cut in _cuts(plain) if size_of(plain) > most_bytes - _MARGIN else ():
        kept = cut.fit(lambda: size_of(plain) <= most_bytes - _MARGIN)
        if kept < cut.count:
            left_out[cut.name] = left_out.get(cut.name, 0) + cut.count - kept
        if size_of(plain) <= most_bytes - _MARGIN:
            break
    return {**plain, "left_out": left_out}


def size_of(plain: Any) -> int:
    """Return how many bytes plain data has as it is printed, within a list."""
    return len(json.dumps([plain], indent=1, default=str))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Some entries of a document that can be left out from the end: `keep(n)` leaves the first ones."""

    name: str
    count: int
    keep: Callable[[int], None]

    def fit(self, fits: Callable[[], bool]) -> int:
        """Keep as many entries as fit, none where that does not help, and return how many."""
        self.keep(0)
        low, high = 0, self.count + 1
        while fits() and high - low > 1:
            middle = (low + high) // 2
            self.keep(middle)
            low, high = (middle, high) if fits() else (low, middle)
            self.keep(low)
        return low


def _cuts(plain: dict[str, Any]) -> Iterator[_Cut]:
    """Yield what may be left out, the least important part first."""
    last, issues = plain.get("last", {}), plain["issues"]
    for source, values in last.items():
        whole = sum(name.count("/") < 2 for name in values)
        yield _cut("last", last, source, least=whole)
    yield _details(issues)
    if plain.get("summary") is not None:
        yield _Cut("summary", 1, _setter(plain, "summary", lambda kept, value: value if kept else None))
    for name in ("files", "resumed"):
        if name in plain:
            yield _cut(name, plain, name)
    yield _cut("issues", plain, "issues", least=sum(issue["open"] for issue in issues))
    for source in last:
        yield _cut("last", last, source)
    if "caveats" in plain:
        yield _cut("caveats", plain, "caveats")
    yield _cut("issues", plain, "issues")
    if "last" in plain:
        yield _cut("last", plain, "last")


def _cut(name: str, holder: dict[str, Any], key: str, *, least: int = 0) -> _Cut:
    """Return the cut of a list or a mapping down to its first entries."""

    def shorten(kept: int, value: Any) -> Any:
        first = islice(value.items() if isinstance(value, dict) else value, kept + least)
        return dict(first) if isinstance(value, dict) else list(first)

    return _Cut(name, max(len(holder[key]) - least, 0), _setter(holder, key, shorten))


def _setter(holder: dict[str, Any], key: str, change: Callable[[int, Any], Any]) -> Callable[[int], None]:
    whole = holder[key]

    def keep(kept: int) -> None:
        holder[key] = change(kept, whole)

    return keep


def _details(issues: list[dict[str, Any]]) -> _Cut:
    """Return the cut of how issues stood when they opened and at the end, and of the times between these two."""
    whole = [(issue["first"], issue["last"], issue["spans"]) for issue in issues]

    def keep(kept: int) -> None:
        for number, (issue, (first, last, spans)) in enumerate(zip(issues, whole, strict=True)):
            is_kept = number < kept
            issue["first"], issue["last"] = (first, last) if is_kept else (None, None)
            issue["spans"] = spans if is_kept or len(spans) < 3 else [spans[0], spans[-1]]

    return _Cut("details", len(issues), keep)
