"""Properties alone: `pytest -p tests.proof.more_examples --hypothesis-profile=proof tests`.

Left out are those whose examples are passes of a model or whole runs.
"""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_test = collection_path.suffix == ".py"
    return True if is_test and "hypothesis" not in collection_path.read_text() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [
        item for item in items if hasattr(item.obj, "hypothesis") and "model_folders" not in item.fixturenames
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
