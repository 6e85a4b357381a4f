# SPDX-License-Identifier: Apache-2.0
"""The plans that the tests run, each built once a session."""

from __future__ import annotations

import pytest

from tests.gpu.plans import Plan, build


@pytest.fixture(scope="session")
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The plan of a Case, which the test gives as an indirect parameter."""
    return build(request.param, tmp_path_factory.mktemp(str(request.param)))
