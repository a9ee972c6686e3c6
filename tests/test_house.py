"""The house keeps its order: what import-linter's contracts and ruff leave to be said."""

import ast
import re
import subprocess
import sys
import tokenize
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest
import yaml

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
PACKAGES = SETTINGS["root_packages"]
MOST_LINES = 60
GIVEN_ALL = {
    "prepare.prepare_run",  # gives every other function in planning the section that it needs
    "prepare._resolve",
    "prepare.resolve",
    # open keys lie in any section, and a candidate is a configuration
    *(f"choice.{name}" for name in ("_computes_anew", "_of_encoders", "_of_layout", "as_saved", "chosen")),
    "choice.continued",
    *(f"choice.{name}" for name in ("open_keys", "opened", "reopened", "unchosen", "value_of", "with_keys")),
    *(f"room.{name}" for name in ("cut_of_longer", "domain_sizes", "samples_of_step", "shortened")),
    *(f"trials.{name}" for name in ("_simulated", "on_whole_steps", "once", "tried_out")),
    *(f"layout_question.{name}" for name in ("_is_set", "question_of", "resolve")),
    *(f"layout_space.{name}" for name in ("space_of", "spelt_out")),
    *(f"search.{name}" for name in ("_domain_ranks", "_quick", "_replicas", "_simulated", "resolve")),
    "choices.with_pairing",
    "choose.choose",
    "balance_table.planner_of",  # resolves a run for every row of its table
    "balance_table.choices",
    "trainable.check_trainable",  # a table of keys of all sections
    "trainable._of_run",
    "trainable._of_encoders",
}
"""Functions of planning that are given the whole configuration, and why."""


def test_importing_what_plans_loads_no_tensors():
    (pure,) = (contract for contract in SETTINGS["contracts"] if contract["type"] == "forbidden")
    modules = pure["source_modules"]
    assert "pipeline.plan" in modules
    assert len(set(modules)) == len(modules)
    code = f"import sys, {', '.join(modules)}; print(sorted({{'torch', 'megatron'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_planning_is_given_sections():
    whole = [
        f"{path.stem}.{function.name}"
        for path in sorted((ROOT / "omni/planning").glob("*.py"))
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for argument in (*function.args.args, *function.args.kwonlyargs)
        if isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Config"
    ]
    assert set(whole) == GIVEN_ALL


def test_no_imports_run_in_a_circle():
    # Those inside functions and those for type checkers count, too.
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert imports["pipeline.plan"]
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


def test_benchmarks_import_what_is_there():
    files = [*(ROOT / "benchmarks").glob("*.py")]
    assert files
    assert [missing for path in files for missing in missing_names(path)] == []


def missing_names(path: Path) -> list[str]:
    """Names that a file imports from one of our modules, which does not have them."""
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            place = ROOT / node.module.replace(".", "/")
            source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            words = set(re.findall(r"\w+", source.read_text()))
            missing += [
                f"{path.name}: {node.module} has no {name.name}"
                for name in node.names
                if name.name not in words and not (place / f"{name.name}.py").exists()
            ]
    return missing


def test_hooks_before_a_commit_are_those_of_make_check():
    (rule,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = repository["hooks"]
    assert [hook["entry"] for hook in hooks] == [
        line.strip().replace("$(BIN)", ".venv/bin") for line in rule.splitlines()
    ]
    assert {hook["language"] for hook in hooks} == {"system"}


def test_a_long_function_has_its_reason_beside_it():
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert files
    assert [function for path in files for function in long_functions(path)] == []


def long_functions(path: Path) -> list[str]:
    """Functions of more than 60 lines that no comment `# long: ...` stands above."""
    text = path.read_text()
    lines = text.splitlines()
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MOST_LINES
        and not lines[node.lineno - 2].lstrip().startswith("# long: ")
    ]


SHARED_NAMES = {
    "Batch": "neighbours for one call of attention; what a job's script tells Slurm",
    "Block": "rows and heads that are exchanged; a piece of a part that states its work",
    "Deferral": "of gradients of weights; of samples",
    "Finding": "of a rehearsal; of a host's checks",
    "Group": "of domains; of ranks, inside one policy",
    "Job": "a fetch under way; of a cluster",
    "Layer": "that calibration times; that has moments",
    "Layout": "of ranks; of the names in a reduction",
    "LayoutError": "of ranks; of the names in a reduction",
    "Op": "of a schedule; of a reduction",
    "Part": "of a tile; of the model on a rank",
    "Piece": "of a sequence; of a checkpoint's tensor",
    "Place": "of a rank; of a part of a tile",
    "Places": "of a sample's items; of a rank in a mesh",
    "Prepared": "a job of a sweep; a step that is ready",
    "Rule": "of configuration; of weights of open models",
    "Sample": "a training document; a measured pass",
    "Shard": "of a sequence; of a file",
    "Spent": "by passes through a part; by a step",
    "Stream": "named as torch.cuda names it; of samples",
    "Wanted": "of a folder of weights; of a checkpoint",
    "Work": "of a loader; of a component",
}
"""Class names that mean two things, and which: those that stood when the rule came. None is to be added."""


def test_a_class_name_means_one_thing():
    places: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name.lstrip("_"), set()).add(f"{path.relative_to(ROOT)}")
    assert len(places) > 300
    shared = {name: sorted(of) for name, of in places.items() if len(of) > 1}
    assert {name: of for name, of in shared.items() if name not in SHARED_NAMES} == {}
    assert SHARED_NAMES.keys() <= shared.keys(), "an exception that nothing needs"


RETIRED = {
    "num_members": "num_cp_ranks",
    "Slot": "TpGroup",
    "Chunk": "EncoderBatch",
    "quantum": "encoder_batch",
    "quanta": "encoder_batches",
    "party": "collective_group",
    "parties": "collective_group_of",
    "num_parts": "num_virtual_stages",
    "stage_parts": "virtual_stages_by_stage",
    "parts_with_rows": "virtual_stages_with_rows",
    "part_name": "virtual_stage_name",
    "llm_part": "llm_virtual_stage",
    "llm_parts": "virtual_stage_layers",
    "LLMPart": "VirtualStage",
    "PartModule": "VirtualStageModule",
    "domain_ranks": "global_ranks",
}
"""Names that readers of Megatron-LM and torchtitan do not know, and what took their place."""
RETIRED_IN_PLANS = {
    "member": "cp_rank",
    "position": "domain_rank",
    "chunk": "encoder_batch",
    "chunks": "encoder_batches",
}
"""Those that mean something else beside the pipeline: of an archive, of a token, of bytes."""


def test_names_that_are_retired_stay_out():
    found = []
    for package in PACKAGES:
        retired = RETIRED | (RETIRED_IN_PLANS if package == "pipeline" else {})
        for path in (ROOT / package).rglob("*.py"):
            with tokenize.open(path) as file:
                names = {token.string for token in tokenize.generate_tokens(file.readline)}
            found += [
                f"{path.relative_to(ROOT)}: {name} is now {retired[name]}" for name in names & retired.keys()
            ]
    assert sorted(found) == []


def test_every_wait_for_a_program_and_of_a_group_has_an_end():
    """By itself a program is waited for without one, and a process group waits as long as its backend:
    half an hour, whatever its world was given.
    """
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    unbounded = [found for file in files for found in waits(file)]
    assert unbounded == []


def waits(path: Path) -> list[str]:
    """Calls of a file that start a program or make a process group without saying how long they may wait."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for call in calls
        if ast.unparse(call.func) in ("subprocess.run", "dist.new_group")
        and "timeout" not in [keyword.arg for keyword in call.keywords]
        and not (ast.unparse(call.func) == "dist.new_group" and len(call.args) > 1)
    ]
