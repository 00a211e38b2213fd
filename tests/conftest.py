"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the folder of public data named by RLHFLESS_DATA; the test is skipped where it is not set."""
    value = os.environ.get("RLHFLESS_DATA")
    if not value:
        pytest.skip("RLHFLESS_DATA is not set: this test reads public data that is not in the repository")
    path = Path(value)
    if not path.is_dir():
        pytest.fail(f"RLHFLESS_DATA names {value}, which is not a folder")
    return path
