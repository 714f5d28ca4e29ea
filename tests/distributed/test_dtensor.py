"""Calls with DTensors on a mesh of two dimensions. One dimension: sample.py."""

from __future__ import annotations

import pytest

from tests.support.processes import assert_runs


@pytest.mark.exhaustive
def test_a_mesh_of_two_dimensions() -> None:
    assert_runs(4, "tests.distributed.dtensor_checks:check_mesh")
