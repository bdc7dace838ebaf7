"""The rules of the house, held by a test: who may import whom, and what may stand where.

Everything is read with `ast`, nothing is imported. A failure lists every place, and says what to
do. An exception has a row in a table here, with its reason; there is no other way to make one.
"""

import ast
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("p2pckpt", "topology", "simulations")
TOOLS = ("tests/bench",)
"""Programs among the tests: as short as the product, without exceptions."""

# -- who is where ----------------------------------------------------------------------------------

ROWS = [
    ("topology",),
    ("p2pckpt.errors",),
    ("p2pckpt.coding",),
    ("p2pckpt.records", "p2pckpt.config", "p2pckpt.telemetry", "p2pckpt.traffic"),
    ("p2pckpt.ports", "p2pckpt.wire", "p2pckpt.jobstate", "p2pckpt.board"),
    (
        "p2pckpt.save",
        "p2pckpt.restore",
        "p2pckpt.backends",
        "p2pckpt.launch",
        "p2pckpt.handles",
        "p2pckpt.notices",
    ),
    ("p2pckpt.seat",),
    ("p2pckpt.agent", "p2pckpt.checkpointer"),
    ("p2pckpt",),  # the package's own face: what `import p2pckpt` gives
    ("p2pckpt.integrations",),
    ("simulations", "simulations.world", "simulations.study", "p2pckpt.demo"),
    ("simulations.papers",),
    ("p2pckpt.cli",),
]
"""Lowest first. A module imports from strictly lower rows only, or from its own package (below)."""

SAME_ROW = {
    "p2pckpt.jobstate": {"p2pckpt.ports", "p2pckpt.wire"},
    "p2pckpt.board": {"p2pckpt.wire"},
}
"""The job's state is a value made of wire's records and ports' changes; a board is memory that
holds wire's records."""

STORIES = {
    "p2pckpt.save.pipeline", "p2pckpt.restore.pipeline", "p2pckpt.agent.daemon",
    "p2pckpt.agent.wiring", "p2pckpt.cli.main", "p2pckpt.demo.story", "p2pckpt.demo.chaos",
    "simulations.world.story", "simulations.world.campaign", "simulations.world.quiet",
    "simulations.study.story", "simulations.study.replays", "simulations.papers.checks",
    "simulations.papers.loss_checks", "simulations.papers.time_checks", "p2pckpt.cli.simulate",
    "topology", "topology.place", "topology.discover", "topology.plan",
}  # fmt: skip
"""The one file of a package that tells its story imports its siblings."""

NOUNS = {
    "topology.cluster", "topology.rules", "topology.ground", "topology.hostlist",
    "topology.place", "p2pckpt.coding.table", "p2pckpt.cli.output", "p2pckpt.cli.picture",
    "p2pckpt.cli.step", "p2pckpt.cli.memory", "p2pckpt.backends.lifeline", "p2pckpt.backends.pages",
    "p2pckpt.backends.descriptors",
    "simulations.world.promises", "simulations.world.training", "simulations.world.contents",
    "simulations.world.lives", "simulations.world.told", "simulations.world.failures",
    "simulations.world.checkers", "simulations.world.clock", "simulations.study.formulas",
    "simulations.study.durability", "simulations.study.traces", "simulations.study.scenario",
    "simulations.study.hazards", "simulations.study.schemes", "simulations.study.network",
    "simulations.study.exposure", "simulations.study.plan", "simulations.study.model",
    "simulations.study.statistics", "simulations.papers.trials", "simulations.papers.finding",
}  # fmt: skip
"""Siblings that everybody in their package may import: they are nouns, not stages."""

STEPS = {
    "p2pckpt.restore.fetch": {"p2pckpt.restore.locate", "p2pckpt.restore.verify"},
    "p2pckpt.demo.strikes": {
        "p2pckpt.demo.campaign",
        "p2pckpt.demo.cluster",
        "p2pckpt.demo.room",
    },
    "p2pckpt.demo.promise": {"p2pckpt.demo.campaign", "p2pckpt.demo.cluster"},
    "p2pckpt.demo.leavings": {"p2pckpt.demo.cluster"},
    "p2pckpt.demo.verdict": {"p2pckpt.demo.journal", "p2pckpt.demo.report"},
    "simulations.study.report": {"simulations.study.story"},
    "simulations.study.figures": {"simulations.study.curves", "simulations.study.story"},
}

AGENT_ORDER = [
    {"holdings", "governing", "waiting"},
    {"home", "roster"},
    {"context"},
    {"gather", "bucket", "installing", "living", "polling", "retire"},
    {"deciding", "reading", "tuning"},
    {"closing", "bringing", "settling", "rereading"},
    {"readying"},
    {
        "rebuilding",
        "saving",
        "restoring",
        "launch",
        "serve",
        "members",
        "status",
        "repair",
        "copies",
        "offloading",
        "cleaning",
        "scheduling",
    },
    {"mending", "owning"},
    {"job", "asking", "scrub", "drain"},
    {"daemon"},
    {"wiring"},
]
"""Inside agent/, lowest first: an agent is larger than one story."""

IMPORT_EXCEPTIONS: dict[tuple[str, str], str] = {
    ("p2pckpt.cli.config", "p2pckpt.cli.agent"): "`config show` shows what `agent` would read",
    ("p2pckpt.cli.doctor", "p2pckpt.cli.agent"): "`doctor` checks what `agent` would read",
    ("simulations.__main__", "p2pckpt.cli.main"): "`python -m simulations` is that command",
}

TORCH = {
    "p2pckpt/save/snapshot.py", "p2pckpt/restore/load.py", "p2pckpt/checkpointer.py",
    "p2pckpt/launch.py",
    "p2pckpt/demo/train.py",
}  # fmt: skip
DOORS = (
    "p2pckpt/backends/", "p2pckpt/demo/", "p2pckpt/cli/", "p2pckpt/checkpointer.py",
    "p2pckpt/launch.py", "p2pckpt/handles.py", "p2pckpt/notices.py", "p2pckpt/seat.py",
)  # fmt: skip
"""Where time, chance, environment, sockets, threads and processes may be."""

EFFECTS = {
    "time", "random", "secrets", "uuid", "socket", "select", "selectors", "signal", "threading",
    "subprocess", "concurrent", "multiprocessing", "ssl", "http", "urllib", "ctypes",
}  # fmt: skip
EFFECT_EXCEPTIONS: dict[tuple[str, str], str] = {
    ("p2pckpt/coding/reed_solomon.py", "ctypes"): "the door to ISA-L, one library per coding file",
    ("simulations/world/clock.py", "selectors"): "the virtual loop's selector, which never selects",
    ("simulations/world/failures.py", "random"): "a seed is one plan",
    ("simulations/world/contents.py", "random"): "what a snapshot must be, from its seed",
    ("simulations/world/relaunches.py", "random"): "a fault draws from its own chance",
    ("simulations/world/shocks.py", "random"): "a fault draws from its own chance",
    ("simulations/world/story.py", "random"): "the nodes' clocks, from the seed",
    ("simulations/world/campaign.py", "random"): "the options of a seed",
    ("simulations/world/campaign.py", "time"): "a campaign has so many minutes of real time",
    ("simulations/world/campaign.py", "subprocess"): "seeds run in processes of their own",
    ("simulations/world/campaign.py", "selectors"): "whichever of them answers first",
}
LATE_IMPORTS = {"p2pckpt.backends.s3": "boto3 is an extra: only who has an object store needs it"}
LONG_FILES: dict[str, tuple[int, str]] = {
    "p2pckpt/records.py": (760, "one file of nouns is easier to read than two"),
    "p2pckpt/ports.py": (550, "all doors in one place; mostly contracts, no code"),
    "p2pckpt/wire.py": (700, "every message in one place, and the envelope"),
}
LONG_FUNCTIONS: dict[str, tuple[int, str]] = {}
MANY_PARAMETERS: dict[str, tuple[int, str]] = {
    "p2pckpt/checkpointer.py::__init__": (11, "the user's options, by keyword"),
}
PRINTERS = {
    "p2pckpt/backends/ucx_line.py": "a child process, whose standard error is its parent's log",
    "p2pckpt/backends/ucx_mover.py": "a child process, whose standard error is its parent's log",
}

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


# -- reading the house -----------------------------------------------------------------------------


@cache
def sources(*tops):
    """{path relative to the root: its tree} of all Python files below some folders."""
    out = {}
    for top in tops:
        for path in sorted((ROOT / top).rglob("*.py")):
            out[path.relative_to(ROOT).as_posix()] = ast.parse(path.read_text(), str(path))
    return out


def module_of(path):
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def modules():
    return {module_of(path): path for path in sources(*PRODUCT)}


def imports_of(module, tree):
    """(line, imported module, only for typing) of every import of ours or of anybody's."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                parts = module_of(module).split(".")
                start = ".".join([*parts[: len(parts) - node.level], *filter(None, [start])])
            names = [
                full if (full := f"{start}.{alias.name}") in modules() else start
                for alias in node.names
            ]
        else:
            continue
        for name in dict.fromkeys(names):
            yield node.lineno, name, id(node) in typing_only


def row_of(module):
    """Number of the row, by the longest name that fits."""
    best = max(
        ((name, i) for i, row in enumerate(ROWS) for name in row
         if module == name or module.startswith(name + ".")),
        key=lambda pair: len(pair[0]),
    )  # fmt: skip
    return best[1]


def package_of(module):
    """The folder that a module stands in; a package's face stands in itself."""
    path = modules()[module]
    return module if path.endswith("__init__.py") else module.rpartition(".")[0]


def sibling_is_allowed(module, imported):
    """May a module import this one of its own folder?"""
    package = package_of(module)
    if module in STORIES or imported in NOUNS or imported in STEPS.get(module, ()):
        return True
    if module == package:
        return True
    if package == "p2pckpt.agent":
        rank = {name: i for i, names in enumerate(AGENT_ORDER) for name in names}
        mine, theirs = (rank.get(m.rpartition(".")[2]) for m in (module, imported))
        return mine is not None and theirs is not None and theirs < mine
    if package.startswith("p2pckpt.backends"):
        if ".inproc" in module and ".inproc" in imported:
            return True
        return family(module) == family(imported)
    return False


def family(module):
    """etcd, etcd_calls, etcd_watch belong together."""
    return module.rpartition(".")[2].partition("_")[0]


def complain(places, what_to_do):
    assert not places, f"{what_to_do}\n  " + "\n  ".join(sorted(places))


# -- imports ---------------------------------------------------------------------------------------


def ours(name):
    return name.split(".")[0] in PRODUCT


def test_imports_go_downwards_only():
    wrong = []
    for path, tree in sources(*PRODUCT).items():
        module = module_of(path)
        for line, imported, _ in imports_of(module, tree):
            if not ours(imported) or imported not in modules() or imported == module:
                continue
            if (module, imported) in IMPORT_EXCEPTIONS or imported in SAME_ROW.get(module, ()):
                continue
            top = {module, imported} <= {m for m in modules() if package_of(m) == "p2pckpt"}
            if not top and package_of(module).split(".")[:2] == package_of(imported).split(".")[:2]:
                continue  # one package: the next test
            if row_of(imported) >= row_of(module):
                wrong.append(
                    f"{path}:{line}: {module} imports {imported}, of the same row or above"
                )
    complain(wrong, "Pass it as an argument, or move what both need into a lower row (ROWS):")


def test_siblings_do_not_import_each_other():
    wrong = []
    for path, tree in sources(*PRODUCT).items():
        module = module_of(path)
        package = package_of(module)
        for line, imported, _ in imports_of(module, tree):
            if imported not in modules() or imported == module or package == "p2pckpt":
                continue
            same = package_of(imported).split(".")[:2] == package.split(".")[:2]
            known = (module, imported) in IMPORT_EXCEPTIONS
            if same and not known and not sibling_is_allowed(module, imported):
                wrong.append(f"{path}:{line}: {module} imports its sibling {imported}")
    complain(wrong, "Let the folder's story file bring them together, or move the noun out:")


def test_every_module_of_the_agent_has_its_place_in_the_order():
    known = set().union(*AGENT_ORDER)
    found = {m.rpartition(".")[2] for m in modules() if m.startswith("p2pckpt.agent.")}
    complain([f"agent/{name}.py" for name in found - known], "Give it a level in AGENT_ORDER:")


def test_nothing_imports_the_tests():
    wrong = [
        f"{path}:{line}: imports {name}"
        for path, tree in sources(*PRODUCT).items()
        for line, name, _ in imports_of(path, tree)
        if name.split(".")[0] in ("tests", "pytest", "hypothesis")
    ]
    complain(wrong, "What the product needs is no test code:")


def test_torch_stays_in_the_trainer():
    wrong = [
        f"{path}:{line}: imports {name}"
        for path, tree in sources(*PRODUCT).items()
        for line, name, _ in imports_of(path, tree)
        if name.split(".")[0] in ("torch", "lightning", "transformers")
        and path not in TORCH
        and not path.startswith("p2pckpt/integrations/")
    ]
    complain(wrong, "An agent never loads torch; hand bytes or numpy over instead:")


def test_time_chance_and_processes_are_behind_doors():
    wrong = []
    for path, tree in sources(*PRODUCT).items():
        if path.startswith(DOORS):
            continue
        for line, name, _ in imports_of(path, tree):
            top = name.split(".")[0]
            if name == "urllib.parse":
                continue  # text only
            if top in EFFECTS and (path, top) not in EFFECT_EXCEPTIONS:
                wrong.append(f"{path}:{line}: imports {name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "urandom"):
                wrong.append(f"{path}:{node.lineno}: reads the environment or chance of os")
            if isinstance(node, ast.Attribute) and node.attr in (
                "run_in_executor", "to_thread", "create_subprocess_exec", "open_connection",
            ):  # fmt: skip
                wrong.append(f"{path}:{node.lineno}: {node.attr}")
    complain(wrong, "Take it as an argument or through a port (ports.py, Doors):")


# -- what may stand in a file ---------------------------------------------------------------------


def test_nothing_is_unpickled_evaluated_or_printed():
    wrong = []
    for path, tree in sources(*PRODUCT).items():
        for line, name, _ in imports_of(path, tree):
            if name.split(".")[0] in FORBIDDEN_IMPORTS or name.endswith("shared_memory"):
                wrong.append(f"{path}:{line}: imports {name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                talks = path.startswith(("p2pckpt/cli/", "p2pckpt/demo/"))
                talks |= path in PRINTERS and "file=sys.stderr" in ast.unparse(node)
                if node.func.id in FORBIDDEN_CALLS or (node.func.id == "print" and not talks):
                    wrong.append(f"{path}:{node.lineno}: calls {node.func.id}()")
            if isinstance(node, ast.Attribute) and node.attr == "shared_memory":
                wrong.append(f"{path}:{node.lineno}: shared_memory (its tracker deletes segments)")
    complain(wrong, "Records go through wire.py; words for people through notes, logging or cli/:")


def test_names_say_what_a_file_is():
    wrong = [
        path
        for path in sources(*PRODUCT, "tests")
        if FORBIDDEN_NAMES & {part.removesuffix(".py") for part in path.split("/")}
    ]
    complain(wrong, "Name the file after its noun or verb:")


def test_every_file_opens_with_a_docstring():
    wrong = []
    for path, tree in sources(*PRODUCT, "tests").items():
        text = ast.get_docstring(tree)
        if not text and tree.body:
            wrong.append(f"{path}: none")
        elif text and len(text.splitlines()) > 30:
            wrong.append(f"{path}: {len(text.splitlines())} lines, at most 30")
    complain(wrong, "Say the intuition, the contract, the consequence (5 to 25 lines):")


def test_files_are_short():
    wrong = []
    for path in sources(*PRODUCT, *TOOLS):
        lines = len((ROOT / path).read_text().splitlines())
        limit = LONG_FILES.get(path, (400, ""))[0]
        if lines > limit:
            wrong.append(f"{path}: {lines} lines, at most {limit}")
    complain(wrong, "Split it along its nouns:")


def functions():
    for path, tree in sources(*PRODUCT, *TOOLS, "tests/faults").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def test_functions_are_short():
    wrong = []
    for path, node in functions():
        lines = node.end_lineno - node.lineno + 1
        if lines > LONG_FUNCTIONS.get(f"{path}::{node.name}", (60, ""))[0]:
            wrong.append(f"{path}:{node.lineno}: {node.name} has {lines} lines, at most 60")
    complain(wrong, "Name a part of it, and call that:")


def test_parameters_are_few():
    wrong = []
    for path, node in functions():
        a = node.args
        names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
        if names[:1] in (["self"], ["cls"]):
            names = names[1:]
        if len(names) > MANY_PARAMETERS.get(f"{path}::{node.name}", (6, ""))[0]:
            wrong.append(f"{path}:{node.lineno}: {node.name} takes {len(names)}, at most 6")
    complain(wrong, "Some of them belong together: make that a record:")


def test_every_import_at_the_top_of_a_core_file_is_of_the_core():
    # Lazy imports hide edges of the graph: outside of the doors there are none.
    wrong = []
    for path, tree in sources(*PRODUCT).items():
        if path.startswith(DOORS) or path == "p2pckpt/__init__.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                wrong += [
                    f"{path}:{inner.lineno}: import inside of {node.name}"
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Import | ast.ImportFrom)
                    and getattr(inner, "module", None) not in LATE_IMPORTS
                ]
    complain(wrong, "Import at the head of the file:")


# -- the wheel -------------------------------------------------------------------------------------


def test_every_package_is_in_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.rpartition("/")[0].replace("/", ".") for path in sources(*PRODUCT)}
    complain(folders - set(listed), "Add to [tool.setuptools] packages in pyproject.toml:")
    complain(set(listed) - folders, "Listed in pyproject.toml, but there is no such package:")


def test_every_package_has_a_face():
    folders = {path.rpartition("/")[0] for path in sources(*PRODUCT)}
    missing = [f for f in folders if not (ROOT / f / "__init__.py").exists()]
    complain(missing, "Add an __init__.py with a docstring:")


def test_every_exception_is_still_needed():
    paths = sources(*PRODUCT)
    gone = [p for p, _ in EFFECT_EXCEPTIONS if p not in paths]
    gone += [p for p in LONG_FILES if len((ROOT / p).read_text().splitlines()) <= 400]
    gone += [p for p in TORCH if p not in paths and not p.startswith("p2pckpt/demo/")]
    gone += [f"{a} imports {b}" for a, b in IMPORT_EXCEPTIONS if a not in modules()]
    gone += [name for name in LATE_IMPORTS if name not in modules()]
    gone += [
        f"{path}: {top}"
        for path, top in EFFECT_EXCEPTIONS
        if path in paths
        and top not in {name.split(".")[0] for _, name, _ in imports_of(path, paths[path])}
    ]
    complain(gone, "Take the row out of its table, the rule holds there now:")
