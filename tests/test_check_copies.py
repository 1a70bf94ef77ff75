"""Each rule of check_copies on small files, what --fix leaves alone, and the repository itself."""

import os
import stat
import subprocess
import sys

import pytest

from cleanrl_utils.check_copies import ROOT, main

GAE = '''\
@partial(jit, static_argnames="n")
@other
def compute_gae(x, n):
    """Advantages."""
    # why
    y = x + n

    return y
'''
MARKER = "# copied from cleanrl/a.py\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes cleanrl/{name}.py below a root of its own, byte for byte, and returns the path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cleanrl").mkdir()
    (tmp_path / "cleanrl_utils" / "envs").mkdir(parents=True)

    def write_file(name, text):
        path = tmp_path / "cleanrl" / f"{name}.py"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write_file


@pytest.fixture
def check(tmp_path, capsys):
    """Runs it below that root; returns the exit code and what it printed."""

    def run(*argv):
        code = main([str(arg) for arg in argv], root=tmp_path)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_equal_copies_pass_without_output(write, check):
    write("a", GAE + "\n\nSIZES: dict = {\n    1: 2,  # why\n}\nclass A(B):\n    x: int\n    y: int\n")
    write("b", f"import os\n\n\n{MARKER}{GAE}\n\n{MARKER}SIZES: dict = {{\n    1: 2,  # why\n}}\n")
    write("c", f"# copied from a.py\n{GAE}\n# copied from ./cleanrl/a.py\nclass A(B):\n    x: int\n    y: int")
    assert check() == (0, "")


@pytest.mark.parametrize(
    "old, new",
    [
        ("x + n", "x - n"),
        ("# why", "# because"),
        ('"n"', '"x"'),
        ("@other\n", ""),
        ("Advantages", "advantages"),
        ("\n\n    return", "\n    return"),
        ("return y\n", "return y  # why\n"),
        ("return y\n", "return y\n    # an indented comment below belongs to the function\n"),
    ],
)
def test_any_change_to_a_copy_fails_and_fix_undoes_it(write, check, old, new):
    write("a", GAE)
    copy = write("b", "import os\n\n" + MARKER + GAE.replace(old, new) + "\n\n# below\nx = 1\n")
    code, output = check()
    assert code == 1
    assert output.startswith(
        "cleanrl/b.py:4: compute_gae differs from cleanrl/a.py\n--- cleanrl/b.py\n+++ cleanrl/a.py\n"
    )
    assert check("--fix") == (0, "cleanrl/b.py:4: compute_gae rewritten from cleanrl/a.py\n")
    assert copy.read_text() == "import os\n\n" + MARKER + GAE + "\n\n# below\nx = 1\n"
    assert check() == (0, "")


def test_the_diff_shows_what_fix_would_do(write, check):
    write("a", GAE)
    write("b", MARKER + GAE.replace("x + n", "x - n"))
    assert check()[1].splitlines()[3:] == ["@@ -5,3 +5,3 @@", "     # why", "-    y = x - n", "+    y = x + n", " "]


def test_the_original_decides_even_when_only_the_copy_is_given(write, check):
    write("a", GAE)
    copy = write("b", MARKER + GAE.replace("x + n", "x - n"))
    assert check(copy)[0] == 1
    assert check(copy, "--fix")[0] == 0
    assert copy.read_text() == MARKER + GAE


def test_kinds_of_definitions(write, check):
    write("a", "async def f():\n    pass\nclass A:\n    x = 1\nB = 1\nC: int = 2\nD = E = 3\nF, G = 4, 5\n")
    copies = ["async def f():\n    0", "class A:\n    x = 2", "B = 0", "C: int = 0", "D = E = 0", "F, G = 0, 0"]
    copy = write("b", "".join(f"{MARKER}{text}\n" for text in copies))
    assert check()[1].count("differs from cleanrl/a.py") == len(copies)
    assert check("--fix")[0] == 0
    assert copy.read_text().replace(MARKER, "") == (copy.parent / "a.py").read_text()


def test_the_original_must_exist(write, check):
    write("b", MARKER + GAE + "# copied from nowhere.py\nx = 1\n# copied from the paper, eq. 3\ny = 1\n")
    code, output = check()
    assert code == 1
    assert output.splitlines() == [
        "cleanrl/b.py:2: compute_gae is marked as copied from cleanrl/a.py, which does not exist",
        "cleanrl/b.py:11: x is marked as copied from cleanrl/nowhere.py, which does not exist",
        "cleanrl/b.py:13: y is marked as copied from cleanrl/the paper, eq. 3, which does not exist",
    ]
    assert check("--fix") == (code, output)


def test_the_original_must_define_the_name(write, check):
    write("a", "def outer():\n    def f():\n        pass\n\n\nif True:\n    g = 1\n")
    write("b", MARKER + "def f():\n    pass\n\n\n" + MARKER + "g = 1\n")
    code, output = check()
    assert code == 1
    assert output.splitlines() == [
        "cleanrl/b.py:2: f is marked as copied from cleanrl/a.py, which does not define it",
        "cleanrl/b.py:7: g is marked as copied from cleanrl/a.py, which does not define it",
    ]
    assert check("--fix") == (code, output)


def test_no_copies_of_copies(write, check):
    write("a", GAE)
    write("b", MARKER + GAE)
    copy = write("c", "# copied from cleanrl/b.py\n" + GAE.replace("x + n", "x - n"))
    problem = "cleanrl/c.py:2: compute_gae is a copy of a copy: cleanrl/b.py:2 is copied from cleanrl/a.py\n"
    before = copy.read_bytes()
    assert check() == check("--fix") == (1, problem)
    assert copy.read_bytes() == before


def test_no_copies_of_itself(write, check):
    write("a", MARKER + GAE)
    assert check()[0] == 1


@pytest.mark.parametrize(
    "text",
    [
        f"{MARKER}\n{GAE}",  # a blank line between
        f"{MARKER}# a comment between\n{GAE}",
        f"x = 1  {MARKER}{GAE}",
        f"class B:\n    {MARKER}    def f(self):\n        pass\n",
        f"{MARKER}import os\n",
        f"{MARKER}x = 1; y = 2\n",
        f"x = [\n{MARKER}]\n",
        f"x = 1\n{MARKER}",
    ],
)
def test_a_marker_without_a_definition_fails(write, check, text):
    write("a", "def f():\n    pass\n")
    copy = write("b", text)
    code, output = check(copy, "--fix")
    assert code == 1 and output.endswith(": this marker is not directly above a top-level definition\n")
    assert copy.read_text() == text


def test_markers_in_strings_are_no_markers(write, check):
    write("a", f'"""\n{MARKER}"""\n\nx = """\n{MARKER}def f(): pass\n"""\n')
    assert check() == (0, "")


def test_a_marker_in_another_case_is_one(write, check):
    write("a", GAE)
    write("b", MARKER.replace("copied", "Copied") + GAE)
    assert check() == (0, "")


@pytest.mark.parametrize("text", [GAE, "class A:\n    x: int\n    y: int\n"])
def test_identical_but_unmarked_fails(write, check, text):
    write("a", text)
    other = write("b", "import os\n" + text)
    (other.parents[1] / "cleanrl_utils" / "envs" / "c.py").write_text(text)
    name = "A" if "class" in text else "compute_gae"
    code, output = check()
    assert code == 1
    assert [line.split(": put")[0] for line in output.splitlines()] == [
        f"cleanrl/b.py:2: {name} is identical but unmarked in cleanrl/a.py:1",
        f"cleanrl_utils/envs/c.py:1: {name} is identical but unmarked in cleanrl/a.py:1",
    ]


def test_identical_and_marked_by_different_originals_fails(write, check):
    a, b, c = write("a", GAE), write("b", GAE), write("c", MARKER + GAE)
    assert check(a, c) == check(c, a) == (0, "")
    assert check(b, c)[0] == check(c, b)[0] == 1


def test_copies_of_one_original_pass_without_it(write, check):
    write("a", GAE)
    assert check(write("b", MARKER + GAE), write("c", MARKER + GAE)) == (0, "")


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x\n", "X = [\n    1,\n    2,\n    3,\n]\n", "class A(B): ...\n"]
)
def test_small_things_and_assignments_may_be_alike(write, check, text):
    write("a", text)
    write("b", text)
    assert check() == (0, "")


def test_the_same_name_with_another_text_passes(write, check):
    write("a", GAE)
    write("b", GAE.replace("x + n", "x - n"))
    assert check() == (0, "")


def test_a_file_given_twice_is_one_file(write, check):
    path = write("a", GAE)
    assert check(path, "cleanrl/a.py", "cleanrl/../cleanrl/a.py") == (0, "")


def test_fix_leaves_every_other_byte(write, check):
    """Odd line endings, a byte order mark, form feeds, other encodings' separators and no newline at the end."""
    write("a", "def f():\n    return 'ä'\n\n\ndef g():\n\n    return 2\n\n\nX = 1\n")
    marker = MARKER.strip().encode()
    head = b"\xef\xbb\xbf'''\x0b \xe2\x80\xa8 \x0c'''\r\nimport os  \t\n\x0c\n" + marker + b"   \r\n"
    middle = b"\r\n  \n# comment\n\n" + marker + b"\n"
    tail = b"\n\n\ny   =  3 \n" + marker + b"\r\n"
    copy = write("b", head + b"def f():\r\n    old\r\n" + middle + b"def g(): pass\n" + tail + b"X = (\n0)")
    copy.chmod(0o755)
    assert check("--fix")[0] == 0
    f, g = "def f():\r\n    return 'ä'\r\n".encode(), b"def g():\n\n    return 2\n"
    assert copy.read_bytes() == head + f + middle + g + tail + b"X = 1"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o755
    assert check() == (0, "")


def test_fix_writes_the_line_ending_of_the_file(write, check):
    write("a", GAE)
    copy = write("b", (MARKER + "def compute_gae(): pass").replace("\n", "\r\n").encode())
    assert check("--fix")[0] == 0
    assert copy.read_bytes() == (MARKER + GAE).strip().replace("\n", "\r\n").encode()
    assert check() == (0, "")


def test_fix_does_not_touch_files_without_differences(write, check):
    paths = write("a", GAE), write("b", MARKER + GAE)
    before = [path.stat() for path in paths]
    assert check("--fix") == (0, "")
    assert [path.stat() for path in paths] == before


def test_fix_is_atomic(write, check, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    write("a", GAE)
    copy = write("b", MARKER + "def compute_gae(): pass\n")
    monkeypatch.setattr(os, "replace", fail)
    assert check("--fix") == (2, "error: disk full\n")
    assert copy.read_text() == MARKER + "def compute_gae(): pass\n"


def test_a_users_mistake_is_one_line(write, check, capsys):
    write("a", GAE)
    assert check("cleanrl/none.py") == (2, "error: cleanrl/none.py: No such file or directory\n")
    assert check("cleanrl") == (2, "error: cleanrl: Is a directory\n")
    for text in (b"x = 1\ndef f(:\n", b"x = '\xff'\n", b"x = 1\0\n", b"def f():\n    x\n  y\n", b"x = '''\n"):
        write("b", MARKER.encode() + text)
        for argv in ([], ["--fix"]):
            code, output = check(*argv)
            assert code == 2 and output.startswith("error: cleanrl/b.py: ") and output.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        check("--nonsense")
    assert capsys.readouterr().err == "check_copies: error: unrecognized arguments: --nonsense\n"


def test_this_repository_with_the_standard_library_alone():
    command = [sys.executable, "-S", "-m", "cleanrl_utils.check_copies"]  # -S: no site-packages
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
