"""Keeps copies equal: files copy what they share under a marker, and this compares the copies with their originals.

    python3 -m cleanrl_utils.check_copies                       # cleanrl/*.py and cleanrl_utils/**/*.py
    python3 -m cleanrl_utils.check_copies cleanrl/*.py --fix    # rewrite the copies that differ

The marker is a comment line, `# copied from FILE`, directly above a top-level function (or its decorators), class or
assignment. FILE is a path from the repository's root, or the name of a file in the same folder. What fails:

- a copy whose text differs from the definition of the same name in FILE: decorators, body, comments inside;
- a marker whose FILE does not exist, does not define the name or is itself marked there (no copies of copies), and
  a marker that is not directly above a top-level definition;
- "identical but unmarked": a function or class of three lines or more that has the same name and text in two of the
  files, unless one is marked as a copy of the other, or both as copies of the same. Assignments and shorter
  definitions may be alike by chance.

Exit code: 0 if nothing fails, 1 if something does, 2 if a file can't be read, parsed or written.
"""

import argparse
import ast
import difflib
import os
import shutil
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARKER = "# copied from "
MIN_LINES_UNMARKED = 3


@dataclass(frozen=True)
class Definition:
    """A function, class or assignment at the top level of a file: its lines[start:end]."""

    name: str
    is_assignment: bool
    file: str  # like `original`, a path from the root
    original: str | None  # the file that the marker names
    start: int
    end: int
    text: tuple[bytes, ...]  # the lines without their endings

    @property
    def place(self) -> str:
        return f"{self.file}:{self.start + 1}"


@dataclass(frozen=True)
class Module:
    lines: list[bytes]
    definitions: list[Definition]
    stray_markers: list[int]  # line numbers


def definition_name(node: ast.stmt) -> str | None:
    """None if the statement is no definition."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.name
        case ast.Assign():
            return ", ".join(ast.unparse(target) for target in node.targets)
        case ast.AnnAssign():
            return ast.unparse(node.target)
    return None


def definition_span(node: ast.stmt, lines: list[bytes]) -> tuple[int, int]:
    """(start, end) of lines[start:end], from the first decorator to the last comment that is indented below."""
    start = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])]) - 1
    below = takewhile(lambda line: line[:1] in b" \t\r\n", lines[node.end_lineno :])
    return start, node.end_lineno + max((i for i, line in enumerate(below, 1) if line.strip()), default=0)


def shares_line(node: ast.stmt, lines: list[bytes]) -> bool:
    """Whether a semicolon joins the statement to another one, so that whole lines are not its own."""
    return node.col_offset > 0 or lines[node.end_lineno - 1][node.end_col_offset :].lstrip().startswith(b";")


def original_file(file: str, marker: str) -> str:
    """What a marker in `file` names, as a path from the root."""
    name = marker[len(MARKER) :].strip()
    return os.path.normpath(name if "/" in name else os.path.join(os.path.dirname(file), name))


def read_module(root: Path, file: str) -> Module:
    """The definitions of a file in their order; raises ValueError, with the reason, if it can't be read or parsed."""
    try:
        source = (root / file).read_bytes()
        tree = ast.parse(source, file)
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{file}: {getattr(error, 'strerror', error)}") from None
    lines = source.splitlines(keepends=True)
    markers = {
        token.start: token.string
        for token in tokenize.tokenize(iter(lines).__next__)
        if token.type == tokenize.COMMENT and token.string.lower().startswith(MARKER)
    }
    definitions = []
    for node in tree.body:
        name = definition_name(node)
        if name is None or shares_line(node, lines):
            continue
        start, end = definition_span(node, lines)
        marker = markers.pop((start, 0), None)  # tokens count lines from 1: this is the line above
        original = original_file(file, marker) if marker else None
        text = tuple(line.rstrip(b"\r\n") for line in lines[start:end])
        is_assignment = isinstance(node, ast.Assign | ast.AnnAssign)
        definitions.append(Definition(name, is_assignment, file, original, start, end, text))
    return Module(lines, definitions, stray_markers=[line for line, _ in markers])


def read_modules(root: Path, files: list[str]) -> dict[str, Module]:
    """The files and those that their markers name, where these exist; raises ValueError like read_module."""
    modules = {file: read_module(root, file) for file in files}
    originals = {definition.original for module in modules.values() for definition in module.definitions}
    for file in originals - {None} - modules.keys():
        if (root / file).is_file():
            modules[file] = read_module(root, file)
    return modules


def find_original(copy: Definition, modules: dict[str, Module]) -> Definition:
    """The definition that a marked one is a copy of; raises LookupError, with the reason, if there is none."""
    if copy.original not in modules:
        raise LookupError(f"{copy.name} is marked as copied from {copy.original}, which does not exist")
    by_name = {definition.name: definition for definition in modules[copy.original].definitions}  # the last one counts
    if copy.name not in by_name:
        raise LookupError(f"{copy.name} is marked as copied from {copy.original}, which does not define it")
    original = by_name[copy.name]
    if original.original:
        raise LookupError(f"{copy.name} is a copy of a copy: {original.place} is copied from {original.original}")
    return original


def check_copy(copy: Definition, modules: dict[str, Module]) -> str | None:
    """What is wrong with a marked definition, with a diff of what --fix would change; None if nothing is."""
    try:
        original = find_original(copy, modules)
    except LookupError as error:
        return str(error)
    if copy.text == original.text:
        return None
    texts = ([line.decode(errors="replace") for line in definition.text] for definition in (copy, original))
    diff = difflib.unified_diff(*texts, copy.file, original.file, lineterm="", n=1)
    return "\n".join([f"{copy.name} differs from {original.file}", *diff])


def find_problems(files: list[str], modules: dict[str, Module]) -> Iterator[str]:
    """One message for every check that fails in the files."""
    first_alike = {}
    for file in files:
        for line in modules[file].stray_markers:
            yield f"{file}:{line}: this marker is not directly above a top-level definition"
        for definition in modules[file].definitions:
            if definition.original and (problem := check_copy(definition, modules)):
                yield f"{definition.place}: {problem}"
            if definition.is_assignment or len(definition.text) < MIN_LINES_UNMARKED:
                continue
            alike = first_alike.setdefault((definition.name, definition.text), definition)
            if (alike.original or alike.file) != (definition.original or definition.file):
                advice = f"put '{MARKER}FILE' above one of them, or above both with the same FILE"
                yield f"{definition.place}: {definition.name} is identical but unmarked in {alike.place}: {advice}"


def fix_copies(root: Path, files: list[str], modules: dict[str, Module]) -> None:
    """Rewrites copies that differ from their originals, and no other byte; raises OSError."""
    for file in files:
        lines, report = modules[file].lines.copy(), []
        copies = [definition for definition in modules[file].definitions if definition.original]
        for copy in reversed(copies):  # upwards: what is above keeps its line numbers
            try:
                original = find_original(copy, modules)
            except LookupError:  # for find_problems to report
                continue
            if copy.text != original.text:
                marker, last = lines[copy.start - 1], lines[copy.end - 1]
                line_ending, last_ending = (line[len(line.rstrip(b"\r\n")) :] for line in (marker, last))
                lines[copy.start : copy.end] = [line_ending.join(original.text) + last_ending]
                report.insert(0, f"{copy.place}: {copy.name} rewritten from {original.file}")
        if report:
            replace_file(root / file, b"".join(lines))
            print("\n".join(report))


def replace_file(path: Path, data: bytes) -> None:
    """The file is always whole and keeps its mode."""
    new = path.with_name(path.name + ".tmp")
    new.write_bytes(data)
    shutil.copymode(path, new)
    os.replace(new, path)


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Returns the exit code; raises SystemExit for options that do not exist."""
    parser = argparse.ArgumentParser(
        prog="check_copies",
        usage=argparse.SUPPRESS,  # the description has it, and a mistake shall print one line
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", type=Path, help="Python files to check")
    parser.add_argument("--fix", action="store_true", help="rewrite the copies that differ from their originals")
    args = parser.parse_args(argv)

    root = root.resolve()
    paths = args.files or sorted([*root.glob("cleanrl/*.py"), *root.glob("cleanrl_utils/**/*.py")])
    files = list(dict.fromkeys(os.path.relpath(path.resolve(), root) for path in paths))
    try:
        modules = read_modules(root, files)
        if args.fix:
            fix_copies(root, files, modules)
            modules = read_modules(root, files)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    problems = list(find_problems(files, modules))
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
