"""The issues of a run as SARIF 2.1.0, which code hosts, editors and pipelines show."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from gradtrack._version import __version__
from gradtrack.pages.documents import IssueDocument, issue_documents
from gradtrack.pages.run_data import RunData
from gradtrack.support.names import digest_of

_SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS: Final = {"CRITICAL": "error", "HIGH": "error", "MEDIUM": "warning"}
_LEAST_LEVEL: Final = "note"


def to_sarif(run: RunData) -> str:
    """Return the issues of a run as SARIF: the open ones first, each at its layer, with the run's journal as its file.

    CRITICAL and HIGH are errors, MEDIUM is a warning, and what is below is a note; so is every issue that has closed.
    """
    issues = issue_documents(run)
    kinds = list(dict.fromkeys(issue.issue_type or "UNKNOWN" for issue in issues))
    advice = {issue.issue_type or "UNKNOWN": issue.recommendation for issue in reversed(issues)}
    rules = [_rule(kind, advice[kind]) for kind in kinds]
    found = {
        "tool": {"driver": {"name": "gradtrack", "version": __version__, "rules": rules}},
        "automationDetails": {"id": f"gradtrack/{run.run.run_id}"},
        "invocations": [{"executionSuccessful": run.state in ("ended", "running")}],
        "results": [_result(issue, kinds, _address(run.directory)) for issue in issues],
        "properties": {"state": run.state, "steps": run.total_steps, "healthy": run.healthy},
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [found]}, indent=1, allow_nan=False) + "\n"


def _rule(kind: str, advice: str) -> dict[str, Any]:
    words = kind.replace("_", " ").capitalize()
    return {
        "id": kind,
        "name": kind.title().replace("_", ""),
        "shortDescription": {"text": f"{words}."},
        **({"help": {"text": advice}} if advice else {}),
    }


def _result(issue: IssueDocument, kinds: list[str], address: str) -> dict[str, Any]:
    kind = issue.issue_type or "UNKNOWN"
    place: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": address}, "region": {"startLine": 1}}}
    if issue.layer:
        place["logicalLocations"] = [{"fullyQualifiedName": issue.layer, "kind": "module"}]
    text = f"{issue.message} {issue.recommendation}".strip() or kind
    kept = {"statistic", "value", "threshold", "severity", "spans", "worst_step", "explained_by", "source", "open"}
    return {
        "ruleId": kind,
        "ruleIndex": kinds.index(kind),
        "level": _LEVELS.get(issue.severity, _LEAST_LEVEL) if issue.open else _LEAST_LEVEL,
        "message": {"text": text},
        "locations": [place],
        "partialFingerprints": {"gradtrackIssue/v1": digest_of(f"{issue.source}\n{kind}\n{issue.layer}")},
        "properties": issue.model_dump(mode="json", include=kept),
    }


def _address(directory: Path) -> str:
    """Return the address of a run's journal: relative to the working directory where it lies below it."""
    path = next(iter(sorted(directory.glob("journal-*.jsonl"))), directory)
    relative = os.path.relpath(path)
    return Path(os.path.abspath(path)).as_uri() if relative.startswith(os.pardir) else quote(Path(relative).as_posix())
