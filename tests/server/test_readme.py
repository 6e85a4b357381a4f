# SPDX-License-Identifier: Apache-2.0
"""What the README says is true: its Python runs and prints what it shows, its commands exist, its tables are fresh."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import triton_rerank
from triton_rerank.cli import main as triton_rerank_main

from build_engines.__main__ import main as build_engines_main
from build_engines.readme import README, with_rerankers
from build_engines.table import read_table
from build_engines.triton_server import TritonServer
from tests.server.served import INT8

TEXT = README.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", TEXT, re.DOTALL)
PROGRAMS = {"python -m build_engines": build_engines_main, "triton-rerank": triton_rerank_main}
COMMANDS = [
    line.partition("#")[0].replace("\\", " ").strip()
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.parametrize(("code", "output"), EXAMPLES)
def test_each_python_example_prints_what_the_readme_shows(server: TritonServer, code: str, output: str) -> None:
    served = code.replace("localhost:8001", server.grpc_url).replace('"light_reranker"', f'"{INT8}"')
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(served, "README.md", "exec"), {})  # noqa: S102 - our own README
    found, shown = printed.getvalue().split(), output.split()
    assert len(found) == len(shown)
    for word, expected in zip(found, shown, strict=True):
        # INT8 kernels of other CPUs may round the last digit that is shown differently.
        same = word == expected or abs(float(word) - float(expected)) < 0.02
        assert same, f"{printed.getvalue()!r} is not {output!r}"


def test_the_readme_has_examples_and_commands() -> None:
    assert len(EXAMPLES) == 2
    assert len(COMMANDS) > 8


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(tuple(PROGRAMS))])
def test_each_command_of_the_readme_is_understood(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = next(program for program in PROGRAMS if command.startswith(program))
    # --help after valid arguments exits with 0; argparse refuses an unknown command or option before it gets there.
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[program]([*shlex.split(command.removeprefix(program)), "--help"])
    assert ended.value.code == 0
    usage = capsys.readouterr().out
    assert all(option in usage for option in re.findall(r"--[a-z-]+", command))


def test_the_readme_shows_both_programs() -> None:
    assert all(any(command.startswith(program) for command in COMMANDS) for program in PROGRAMS)


@pytest.mark.parametrize("target", sorted({word for c in COMMANDS if c.startswith("make ") for word in c.split()[1:]}))
def test_each_make_target_of_the_readme_exists(target: str) -> None:
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_table_of_rerankers_is_fresh() -> None:
    assert with_rerankers(TEXT, read_table()) == TEXT, "run: python -m build_engines readme"


@pytest.mark.parametrize("text", re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL))
def test_each_row_that_the_readme_shows_is_taken(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    (row,) = read_table(tmp_path / "mine.toml").values()
    assert row.prompt is not None


def test_every_exception_of_the_package_is_in_the_readme() -> None:
    errors = [
        n
        for n in triton_rerank.__all__
        if isinstance(v := getattr(triton_rerank, n), type) and issubclass(v, Exception)
    ]
    assert len(errors) > 5
    assert [name for name in errors if f"`{name}`" not in TEXT] == []


@pytest.mark.parametrize("link", re.findall(r"\]\(#([a-z0-9-]+)\)", TEXT))
def test_each_link_within_the_readme_leads_to_a_heading(link: str) -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    }
    assert link in headings


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:build_engines|perf|client|tests)/[\w./]+)`", TEXT))))
def test_each_file_that_the_readme_names_exists(path: str) -> None:
    assert (Path(README).parent / path).exists()
