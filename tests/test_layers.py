"""Imports run down only: the house has layers."""

import ast

from commands import ROOT

LAYERS = (
    ("scripts", "monitor_memory", "train_lean"),
    ("grpo.commands",),
    ("grpo.workbench",),
    ("grpo.trainer",),
    ("grpo.phases", "grpo.play"),
    ("grpo.run", "grpo.trl"),
    ("grpo.plan",),
    ("grpo.evaluate",),
    ("grpo.logs",),
    ("grpo.learning",),
    ("grpo.rollout", "grpo.scoring"),
    ("grpo.model",),
    ("grpo.data", "grpo.distributed"),
    ("grpo.rewards", "grpo.memory", "grpo.config", "grpo.types"),
    ("rewards",),
    ("grpo.files", "grpo.environment", "grpo.prompt", "grpo.statistics", "grpo.logs.waiting"),
    ("grpo.errors",),
)
"""Rooms from top to bottom; those side by side do not import each other."""
DEPTH = {room: depth for depth, layer in enumerate(LAYERS) for room in layer}


def room_of(module: str) -> str | None:
    """The room that a module is in, by its dotted name; None for what is not ours."""
    if module.split(".")[0] == "benchmarks":
        return "scripts"
    found = [room for room in DEPTH if module == room or module.startswith(f"{room}.")]
    assert found or module.split(".")[0] not in ("grpo", "rewards"), f"{module} is in no layer"
    return found[0] if found else None


def imports(source: str) -> list[str]:
    """Modules that a file imports, wherever in it."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"grpo.{a.name}" for a in node.names] if node.module == "grpo" else [node.module]
    return names


def runs_up(importer: str, imported: str) -> bool:
    """Whether one room's import of another goes up, or sideways."""
    return importer != imported and DEPTH[imported] <= DEPTH[importer]


def test_imports_run_down() -> None:
    folders = [path for name in ("grpo", "rewards", "scripts") for path in (ROOT / name).rglob("*.py")]
    up = []
    for path in {*folders, *ROOT.glob("*.py")} - {ROOT / "grpo" / "__init__.py"}:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        importer = room_of(name)
        assert importer is not None, f"{name} is in no layer"
        rooms = {each: room_of(each) for each in imports(path.read_text())}
        up += [f"{name} imports {each}" for each, room in rooms.items() if room and runs_up(importer, room)]
    assert not up, "\n".join(up)


def test_imports_that_run_up_are_found() -> None:
    source = "import grpo.phases\nfrom grpo import trainer\ndef f():\n    from grpo.run.setup import Run"
    assert imports(source) == ["grpo.phases", "grpo.trainer", "grpo.run.setup"]
    assert runs_up("grpo.memory", "grpo.run") and runs_up("grpo.data", "grpo.distributed")
    assert not runs_up("grpo.phases", "grpo.memory") and not runs_up("grpo.run", "grpo.run")


def test_memory_and_rewards_stand_alone() -> None:
    for room in ("grpo/memory", "rewards"):
        for path in (ROOT / room).rglob("*.py"):
            ours = {room_of(name) for name in imports(path.read_text())} - {None}
            assert ours <= {room.replace("/", "."), "grpo.environment", "grpo.errors"}, (
                f"{path.relative_to(ROOT)} imports {ours}"
            )
