"""Shared by all tests: where the project is, and hypothesis that gives the same examples every time."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("kvlab", deadline=None, derandomize=True)
settings.load_profile("kvlab")


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parent.parent
