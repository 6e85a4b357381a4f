# SPDX-License-Identifier: Apache-2.0
"""What the unit tests share: tiny models, built once a session."""

from __future__ import annotations

import pytest

from tests.unit.tiny_models import TinyModels


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))
