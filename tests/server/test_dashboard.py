"""The queries of the Grafana dashboard name metrics and labels that the server has."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import pytest

from megakernel_tts import TTS
from megakernel_tts.server.cluster.engine_cluster import EngineCluster
from megakernel_tts.server.metrics import Metrics
from megakernel_tts.server.settings import ServerSettings
from tests.server.cluster.clusters import TWO_PLACES
from tests.server.running import TEXT, running_server

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text())
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
SAMPLE = re.compile(r'([a-z0-9_:]+)\{((?:[a-z_]+="[^"]*",?)*)\} ')


@pytest.fixture(scope="module")
def series(engine: TTS) -> dict[str, set[str]]:
    """Labels of each metric, once a request was served and one refused."""
    with running_server(engine, ServerSettings()) as server:
        asyncio.run(add_engine_metrics(server.server.streams.metrics))
        httpx.post(f"{server.url}/v1/audio/speech", json={"input": TEXT})
        server.server.streams.draining = True
        httpx.post(f"{server.url}/v1/audio/speech", json={"input": TEXT})
        text = httpx.get(f"{server.url}/metrics").text
    found: dict[str, set[str]] = {}
    for name, labels in SAMPLE.findall(text):
        found.setdefault(name, set()).update(re.findall(r'([a-z_]+)="', labels))
    return found


async def add_engine_metrics(metrics: Metrics) -> None:
    """Adds the metrics of a server with `--gpus`."""
    EngineCluster("demo", TWO_PLACES, 1, "text", []).add_metrics(metrics)


def query_of(target: dict[str, Any]) -> promql.Expr:
    text = target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*")
    return promql.parse(text)


def nodes(expression: Any) -> Iterator[Any]:
    """A query's parts."""
    yield expression
    children = [getattr(expression, name, None) for name in ("expr", "lhs", "rhs")]
    children += [getattr(expression, "vector_selector", None), *getattr(expression, "args", ())]
    for child in children:
        if child is not None:
            yield from nodes(child)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["expr"][:80])
def test_a_query_selects_existing_metrics_and_labels(
    target: dict[str, Any], series: dict[str, set[str]]
) -> None:
    parts = [*nodes(query_of(target))]
    selectors = [part for part in parts if isinstance(part, promql.VectorSelector)]
    assert selectors
    labels = {matcher.name for each in selectors for matcher in each.matchers.matchers}
    for part in parts:
        if isinstance(part, promql.AggregateExpr) and part.modifier is not None:
            labels |= {*part.modifier.labels}
    labels |= {*re.findall(r"{{(\w+)}}", target["legendFormat"])}
    for selector in selectors:
        assert selector.name in series, f"there is no metric {selector.name}"
        assert labels <= series[selector.name]


def test_every_metric_is_on_the_dashboard(series: dict[str, set[str]]) -> None:
    text = "".join(target["expr"] for target in TARGETS)
    stems = {re.sub("_(bucket|sum|count)$", "", name) for name in series}
    assert not [stem for stem in stems if stem not in text], "add a panel to deploy/grafana.json"


def test_panels_do_not_overlap_and_refresh_from_the_variables() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len({*cells}) == len(cells) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all("$model" in target["expr"] for target in TARGETS)
