"""The panels as a saved view of an experiment, in the format of MLflow's page."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any

from gradtrack.records import Panel


def saved_view(panels: Iterable[Panel], names: dict[str, str], created_ms: int) -> tuple[str, str]:
    """Return key and value of the experiment's tag that MLflow's page reads as a saved view."""
    sections: dict[str, dict[str, Any]] = {}
    cards = []
    for panel in panels:
        metrics = [names[name] for name in panel.pick(names) if name in names]
        if metrics and panel.kind in ("line", "multi-line", "band"):
            sections[panel.section] = {
                "uuid": _identity(f"section {panel.section}"),
                "name": f"gradtrack: {panel.section}",
                "display": True,
                "isReordered": False,
                "deleted": False,
                "isGenerated": False,
            }
            cards.append(_card(panel, metrics, sections[panel.section]["uuid"]))
    state = {
        "compareRunCharts": cards,
        "compareRunSections": list(sections.values()),
        "isAccordionReordered": False,
        "viewMaximized": True,
        "runListHidden": False,
        "hideEmptyCharts": True,
        "searchFilter": "",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
    }
    view = {"name": "gradtrack", "createdAt": created_ms, "state": json.dumps(state)}
    return f"mlflow.sharedViewState.{_identity('view')}", json.dumps(view)


def _card(panel: Panel, metrics: list[str], section: str) -> dict[str, Any]:
    return {
        "type": "LINE",
        "uuid": _identity(f"card {panel.section} {panel.title}"),
        "metricSectionId": section,
        "displayName": panel.title,
        "metricKey": metrics[0],
        "selectedMetricKeys": metrics,
        "lineSmoothness": 0,
        "xAxisScaleType": "linear",
        "scaleType": "log" if panel.log_scale else "linear",
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "range": {},
        "isGenerated": False,
        "deleted": False,
        "runsCountToCompare": 10,
        # The page shows the name of such a chart only; of any other with several metrics it joins their names.
        "nodeLevelSystemMetricConfiguration": {"metric": panel.title, "type": "panel"},
    }


def _identity(name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, f"gradtrack {name}"))
