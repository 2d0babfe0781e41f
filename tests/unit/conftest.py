"""A book and a store of each module's own, and who makes versions in them."""

from pathlib import Path

import pytest
from lineage_maker import Maker

from infra.lineage.lineage import Lineage
from infra.store.local import LocalStore


@pytest.fixture(scope="module")
def lineage(tmp_path_factory: pytest.TempPathFactory, book) -> Lineage:
    return Lineage(book(tmp_path_factory.mktemp("lineage") / "mlflow.db"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    return LocalStore(tmp_path_factory.mktemp("store"))


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A target of its own for each test."""
    return request.node.originalname.replace("_", "-").replace("test-", "")


@pytest.fixture
def make(lineage: Lineage, store: LocalStore, name: str, tmp_path: Path) -> Maker:
    return Maker(lineage, store, name, tmp_path)
