"""Shared by all tests: where the project is, and hypothesis that gives the same examples every time."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# on a busy machine "too slow" says nothing about a test
settings.register_profile("kvlab", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvlab")


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """What PyTorch draws in a test must not depend on which tests the worker ran before."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
