# SPDX-License-Identifier: Apache-2.0
"""[prompts] of a table give prompts that read as written, or an error naming the section and the field."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from build_engines.errors import TableError
from build_engines.prompts import Prompt
from build_engines.table import DEFAULT_TABLE, Reranker, read_table
from tests.unit.test_table import write

PROMPT = """
[prompts.mine]
prefix = ["<bos>", "Task: {instruction}\\n"]
query = "Q: {query}\\n"
middle = "--"
document = " {document}."
suffix = "Relevant?"
yes = "yes"
no = "no"
instruction = "find it"
"""
ROW = """
[my_reranker]
checkpoint = "owner/name"
revision = "0123456789012345678901234567890123456789"
head = "yes_no"
prompt = "mine"
segment_ids = false
"""


def read(folder: Path, text: str) -> Reranker:
    return read_table(write(folder, text))["my_reranker"]


def prompt_of(reranker: Reranker) -> Prompt:
    assert reranker.prompt is not None
    return reranker.prompt


def test_a_table_of_ones_own_defines_a_prompt(tmp_path: Path) -> None:
    prompt = prompt_of(read(tmp_path, PROMPT + ROW))
    assert prompt.whole("panda", "a bear") == "<bos>Task: find it\nQ: panda\n-- a bear.Relevant?"
    assert (prompt.name, prompt.yes, prompt.no, prompt.apart) == ("mine", "yes", "no", False)
    assert (prompt.pieces("prefix"), prompt.pieces("middle")) == (("<bos>", "Task: find it\n"), ("--",))
    assert (prompt.around_query, prompt.around_document) == (("Q: ", "\n"), (" ", "."))


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3_reranker", "bge_gemma"])
def test_a_table_of_ones_own_uses_the_projects_prompts(tmp_path: Path, name: str) -> None:
    projects = {row.prompt.name: row.prompt for row in read_table(DEFAULT_TABLE).values() if row.prompt}
    assert prompt_of(read(tmp_path, ROW.replace("mine", name))) == projects[name]


def test_a_prompt_of_ones_own_takes_the_place_of_the_projects_of_that_name(tmp_path: Path) -> None:
    text = (PROMPT + ROW).replace("mine", "bge_gemma")
    assert prompt_of(read(tmp_path, text)).suffix == ("Relevant?",)
    assert prompt_of(read_table(DEFAULT_TABLE)["bge_reranker_gemma"]).suffix != ("Relevant?",)


def test_placeholders_in_texts_and_instructions_are_text(tmp_path: Path) -> None:
    prompt = prompt_of(read(tmp_path, PROMPT + ROW + 'instruction = "{query} {document} {instruction}"'))
    assert prompt.whole("{document} {instruction}", "{query} {query}") == (
        "<bos>Task: {query} {document} {instruction}\nQ: {document} {instruction}\n-- {query} {query}.Relevant?"
    )


def test_an_instruction_changes_the_prompt_and_nothing_else(tmp_path: Path) -> None:
    plain, instructed = (read(tmp_path, PROMPT + ROW + line) for line in ("", 'instruction = "look it up"\n'))
    assert prompt_of(instructed).whole("q", "d") == prompt_of(plain).whole("q", "d").replace("find it", "look it up")
    assert dataclasses.replace(prompt_of(instructed), instruction="find it") == plain.prompt
    assert dataclasses.replace(instructed, prompt=plain.prompt) == plain


def test_two_rows_with_one_prompt_keep_their_own_instructions(tmp_path: Path) -> None:
    other = ROW.replace("my_reranker", "other") + 'instruction = "look it up"\n'
    table = read_table(write(tmp_path, PROMPT + other + ROW))
    found = {name: prompt_of(row).instruction for name, row in table.items()}
    assert found == {"other": "look it up", "my_reranker": "find it"}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('query = "Q: {query}', 'query = "Q: ', r"prompts\.mine\.query must hold \{query\} exactly once"),
        ("{query}", "{query}{query}", r"prompts\.mine\.query must hold \{query\} exactly once"),
        ("{document}", "{doc}", r"prompts\.mine\.document must hold \{document\} exactly once"),
        ("{document}", "{document} {document}", r"prompts\.mine\.document must hold \{document\} exactly once"),
        ('"--"', '"{query}"', r"prompts\.mine: \{query\} stands in the field query and nowhere else"),
        ('"<bos>"', '"{document}"', r"prompts\.mine: \{document\} stands in the field document and nowhere else"),
        ("{document}", "{document} {query}", r"prompts\.mine: \{query\} stands in the field query and nowhere else"),
        ("Q: {query}", "{instruction} {query}", r"prompts\.mine: \{instruction\} belongs in prefix, middle or suffix"),
        ('no = "no"', 'no = "yes"', r"prompts\.mine: yes and no must be two different texts; they are 'yes' and 'yes'"),
        ('yes = "yes"', "", r"prompts\.mine: yes and no must be two different texts; they are '' and 'no'"),
        ('suffix = "Relevant?"', "", r"prompts\.mine: a field is missing \(.*suffix"),
        ('suffix = "Relevant?"', 'suffix = ""', r"prompts\.mine\.suffix is \(''?,\); none .* For no text at all: \[\]"),
        ('"<bos>", ', '"", ', r"prompts\.mine\.prefix is .*none of its texts may be empty"),
        ('middle = "--"', "middle = 3", r"prompts\.mine\.middle is \(3,\); give text"),
        ('yes = "yes"', "yes = true", r"prompts\.mine\.yes is True; give text"),
        ('yes = "yes"', 'yes = ["yes"]', r"prompts\.mine\.yes is .*give text"),
        ('no = "no"', 'apart = "no"\nno = "no"', r"prompts\.mine\.apart is 'no'; give true or false"),
        ("suffix =", "sufix =", r"prompts\.mine: unknown field sufix; known: apart, document, "),
        ("suffix =", 'name = "x"\nsuffix =', r"prompts\.mine: unknown field name"),
        ("{instruction}", "", r"prompts\.mine: an instruction, but no \{instruction\} for it"),
        ('instruction = "find it"', "", r"prompts\.mine: \{instruction\} needs an instruction"),
    ],
)
def test_a_wrong_field_of_a_prompt_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert PROMPT.count(old) == 1
    with pytest.raises(TableError, match=says):
        read(tmp_path, PROMPT.replace(old, new) + ROW)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"mine"', '"minr"', "my_reranker: there is no prompt 'minr'; use one of deepseek_r1, .*mine, or add it"),
        ('"mine"', '["mine"]', r"my_reranker: there is no prompt \['mine'\]"),
        ('"mine"', "3", "my_reranker: there is no prompt 3"),
        ('"mine"', '"mine"\ninstruction = ""', r"prompts\.mine: \{instruction\} needs an instruction"),
        ('"mine"', '"mine"\ninstruction = 3', r"prompts\.mine\.instruction is 3; give text"),
        ('"mine"', '"bge_gemma"\ninstruction = "x"', r"prompts\.bge_gemma: an instruction, but no \{instruction\}"),
        ('prompt = "mine"', 'instruction = "x"', "my_reranker: an instruction is part of a prompt; name one"),
        ('prompt = "mine"', "", "my_reranker: a yes_no head needs a prompt that names its yes"),
        (
            "segment_ids = false",
            "segment_ids = true",
            "a prompt is for decoders, which take no segment_ids",
        ),
        ('"yes_no"', '"bi_encoder"', "my_reranker: a prompt is for decoders, which .* are no bi_encoder"),
        ('"mine"', '"mine"\nverdict_floor = 1.0', r"verdict_floor is 1\.0; use a probability from 0 to below 1"),
        ('"mine"', '"mine"\nverdict_floor = -0.1', r"verdict_floor is -0\.1; use a probability"),
        ('"mine"', '"mine"\nverdict_floor = nan', "verdict_floor is nan; use a probability"),
    ],
)
def test_a_row_that_does_not_fit_its_prompt_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert ROW.count(old) == 1
    with pytest.raises(TableError, match=says):
        read(tmp_path, PROMPT + ROW.replace(old, new))


def test_a_yes_no_head_needs_a_verdict_and_a_classifier_does_not(tmp_path: Path) -> None:
    silent = PROMPT.replace('yes = "yes"\nno = "no"\n', "")
    with pytest.raises(TableError, match="my_reranker: a yes_no head needs a prompt that names its yes"):
        read(tmp_path, silent + ROW)
    assert prompt_of(read(tmp_path, silent + ROW.replace("yes_no", "sequence_classification"))).yes == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prompts = 3\n" + ROW.replace("mine", "deepseek_r1"), "prompts is 3; use"),
        ("[prompts]\nmine = 3\n" + ROW, r"prompts\.mine is 3; a prompt is a"),
    ],
)
def test_prompts_that_are_no_sections_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(TableError, match=says):
        read(tmp_path, text)


@pytest.mark.parametrize(("control", "query_max"), [(61, 242), (71, 234), (0, 288)])
def test_a_query_keeps_three_quarters_of_what_the_prompt_leaves(tmp_path: Path, control: int, query_max: int) -> None:
    reranker = read(tmp_path, PROMPT + ROW + "max_length = 384\nbuckets = [384]\n")
    assert reranker.query_max(control) == query_max
