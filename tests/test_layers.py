"""The order of the layers in CONTRIBUTING.md: no module imports from a layer above its own, and none in a circle."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "vision_longhorn"


def module_of(file):
    """Dotted name of a source file as it is installed."""
    path = file.relative_to(ROOT).with_suffix("")
    parts = path.parts if path.parts[0] == PACKAGE else (PACKAGE, *path.parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(file): file for folder in (PACKAGE, "kernels") for file in sorted((ROOT / folder).rglob("*.py"))}


def imports(module):
    """The package's modules that a module imports, those in functions and for type checkers only included."""
    file, found = FILES[module], set()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join(parents + ([node.module] if node.module else []))
            names = [f"{source}.{name.name}" for name in node.names]
        for name in names:
            while name and name not in FILES:
                name = name.rpartition(".")[0]
            found.add(name)
    return found - {"", PACKAGE, module}  # every import runs the package's own file


def layers():
    """The layers by number, lowest first: for each name of a file or folder the number of its layer."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\d+\. (.*(?:\n   .*)*)", re.split("<!-- layers -->|\n## ", text.split("<!-- layers -->", 1)[1])[0], re.M
    )
    return {name: number for number, row in enumerate(rows) for name in re.findall(r"`(\w+)`", row)}


def test_no_module_imports_from_a_layer_above_its_own():
    layer = layers()

    def of(module):
        # The package's own file knows the models, which it registers, and nothing above them.
        return layer["models"] if module == PACKAGE else layer[module.split(".")[1]]

    upward = {f"{module} -> {other}" for module in FILES for other in imports(module) if of(other) > of(module)}
    assert sorted(upward) == [], "\n".join(sorted(upward))


def test_every_layer_in_the_list_is_there():
    assert set(layers()) == {module.split(".")[1] for module in FILES if module != PACKAGE}


def test_no_modules_import_in_a_circle():
    left = {module: imports(module) for module in FILES}
    while free := {m for m in left if not left[m] & left.keys() or not any(m in needs for needs in left.values())}:
        left = {module: needs for module, needs in left.items() if module not in free}
    circle = {module: sorted(needs & left.keys()) for module, needs in left.items()}
    assert circle == {}, circle
