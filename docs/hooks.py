"""MkDocs hooks: the scripts' sources as pages, for links by function name, and included reports."""

import ast
import glob
import os
import re

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File


def source_page(path: str) -> str:
    """Markdown of a Python file: a heading for each top-level function and class, whose name is its anchor."""
    with open(path, encoding="utf-8") as f:
        source = f.read()
    name, lines, end = os.path.basename(path), source.splitlines(), 0
    intro = f"`cleanrl/{name}`, the whole file, with a heading for each name."
    parts = [f"---\nsearch: {{exclude: true}}\n---\n# Source\n\n{intro}"]
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            start = min(part.lineno for part in [node, *node.decorator_list]) - 1
            parts += [code_block(lines[end:start]), f"## {node.name} {{ #{node.name} }}"]
            end = node.end_lineno
            parts.append(code_block(lines[start:end]))
    return "\n\n".join([*parts, code_block(lines[end:])])


def code_block(lines: list[str]) -> str:
    code = "\n".join(lines).strip("\n")
    return f"~~~~ python\n{code}\n~~~~" if code else ""


def on_files(files, config):
    root = os.path.dirname(config.config_file_path)
    for path in sorted(glob.glob(os.path.join(root, "cleanrl", "[!_]*.py"))):
        uri = f"source/{os.path.basename(path).removesuffix('.py')}.md"
        files.append(File.generated(config, uri, content=source_page(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Puts the file docs/PATH in the place of a line {! PATH !}; its relative links go on leading where they led."""

    def include(match):
        path = match[1]
        try:
            with open(os.path.join(config.docs_dir, path), encoding="utf-8") as f:
                text = f.read()
        except OSError as error:
            raise PluginError(f"{page.file.src_uri} includes docs/{path}: {error.strerror}") from error
        folder = os.path.relpath(os.path.dirname(path), os.path.dirname(page.file.src_uri))
        return re.sub(r"(\]\()(?![a-z]+:|[/#])", lambda link: f"{link[1]}{folder}/", text)

    return re.sub(r"^\{! *(\S+) *!\}$", include, markdown, flags=re.MULTILINE)
