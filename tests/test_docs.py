"""The docs hold what the scripts do: every metric, hyperparameter and flag, and a strict build without the network."""

import importlib
import re
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(path.stem for path in ROOT.glob("cleanrl/[!_]*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
HEADINGS = ["Usage", "Explanation of the logged metrics", "Implementation details", "Experiment results"]
FLAGS_OF_OTHERS = {
    "fix",
    "help",
    "json",
    "list",
    "logdir",
    "variant",
}  # of check_copies, ablation and other projects' commands
FLAGS_OF_OTHERS |= {
    "filters",
    "offline",
    "output-filename",
    "rc",
    "rliable",
    "scan-history",
}  # of openrlbenchmark's rlops
FLAGS_OF_OTHERS |= {"extra", "cpu", "gpus-per-task", "ntasks"}  # of uv, gpu_check.sh and srun


def split_by_heading(markdown, level):
    """Heading -> text below it, up to the next one of that level or above; code blocks are no headings."""
    sections, heading, in_code = {}, None, False
    for line in markdown.splitlines():
        in_code ^= line.lstrip().startswith("```")
        match = re.match(r"(#+) (.*)", line)
        if match and not in_code and len(match[1]) <= level:
            heading = match[2] if len(match[1]) == level else None
        elif heading is not None:
            sections[heading] = sections.get(heading, "") + line + "\n"
    return sections


def script_docs(script):
    """The page in docs/rl-algorithms that has the script's section, and this section by its headings."""
    pages = [path.read_text() for path in ROOT.glob("docs/rl-algorithms/*.md")]
    found = [(page, split_by_heading(page, 2).get(f"`{script}.py`")) for page in pages]
    found = [(page, section) for page, section in found if section is not None]
    assert len(found) == 1, f"{script}.py has {len(found)} sections"
    return found[0][0], split_by_heading(found[0][1], 3)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_has_its_section_under_the_usual_headings(script):
    _, section = script_docs(script)
    assert list(section) == HEADINGS


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_tags_that_a_script_logs_are_explained(script):
    page, section = script_docs(script)
    tag = r"(?:charts|losses|eval)/\w+"
    sources = (ROOT / f"cleanrl/{script}.py", ROOT / "cleanrl_utils/running.py")
    logged = {name for source in sources for name in re.findall(rf'"({tag})"', source.read_text())}
    explained = re.compile(rf"^\| `({tag})` \|", re.MULTILINE)
    assert logged and logged <= set(explained.findall(page))
    assert set(explained.findall(section["Explanation of the logged metrics"])) <= logged


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_hyperparameters_stated_are_the_defaults(script):
    page, section = script_docs(script)
    args = importlib.import_module(f"cleanrl.{script}").Args()
    flags = {f"--{name.replace('_', '-')}": in_words(value) for name, value in asdict(args).items()}
    stated = dict(re.findall(r"^\| `(--[a-z0-9-]+)` \| ([^|]*) \|", section["Implementation details"], re.MULTILINE))
    assert stated.items() <= flags.items()
    assert [flag for flag in flags if not re.search(rf"{flag}(?![\w-])", page)] == []


def in_words(value):
    if value is None or isinstance(value, bool):
        return {True: "on", False: "off", None: "none"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def test_flags_that_the_docs_name_exist():
    modules = [f"cleanrl.{script}" for script in SCRIPTS]
    modules += [
        f"cleanrl_utils.{name}" for name in ("benchmark", "enjoy", "huggingface", "report", "rlops", "tuner", "zoo")
    ]
    modules += ["compare_observations", "envs_bridge", "measure", "scale", "throughput"]
    known = {field.name for module in modules for field in fields(importlib.import_module(module).Args)}
    known = {name.replace("_", "-") for name in known} | FLAGS_OF_OTHERS
    for path in PAGES:
        named = re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z0-9-]*)", path.read_text())
        assert set(named) <= known, path


def test_files_that_commands_name_exist():
    for path in PAGES:
        text = re.sub(r"https?://\S+", "", path.read_text())
        for name in re.findall(r"\b(?:cleanrl|benchmark|tests)/\w+\.(?:py|sh|csv)\b", text):
            assert (ROOT / name).is_file(), f"{path} names {name}"


def test_the_site_builds_strictly_and_loads_nothing_from_the_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for path in tmp_path.glob("**/*.html"):
        html = path.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)\b[^>]+\bsrc=[\"']?([^\"'>\s]+)", html)
        loaded += re.findall(r"<link\b[^>]+\bhref=[\"']?([^\"'>\s]+)", html)
        assert loaded and not [url for url in loaded if re.match("(https?:)?//", url)], path
        assert "--8&lt;--" not in html and "{!" not in html, f"{path} has an include that was not resolved"
    page = (tmp_path / "rl-algorithms" / "ppo" / "index.html").read_text()
    for script in SCRIPTS:
        assert f'id="{script}py"' in page, f"{script}.py has no anchor"
        assert (tmp_path / "source" / script / "index.html").is_file()
