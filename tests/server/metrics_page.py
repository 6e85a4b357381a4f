# SPDX-License-Identifier: Apache-2.0
"""What a Prometheus would read from the server."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from build_engines.triton_server import TritonServer

_LINE = re.compile(r"(?P<metric>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)")


@dataclass(frozen=True, slots=True)
class Metrics:
    """Values by metric and model; every model here has one version."""

    values: Mapping[tuple[str, str], float]

    def of(self, metric: str, model: str) -> float:
        """Raises KeyError where the page has no such line."""
        return self.values[metric, model]

    def minus(self, earlier: Metrics) -> Metrics:
        """What was added since."""
        return Metrics({key: value - earlier.values.get(key, 0.0) for key, value in self.values.items()})


def read_metrics(server: TritonServer) -> Metrics:
    """Scrape once."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as response:  # noqa: S310 the address is our own
        page = response.read().decode()
    values = {}
    for line in _LINE.finditer(page):
        model = re.search(r'model="([^"]*)"', line["labels"])
        if model is not None:
            values[line["metric"], model[1]] = float(line["value"])
    return Metrics(values)
