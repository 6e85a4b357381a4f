# SPDX-License-Identifier: Apache-2.0
"""rerankers.toml gives typed rows, or an error naming the row and the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_engines.errors import TableError
from build_engines.table import find_reranker, read_table

TABLE = """
[defaults]
max_batch_size = 64
precision = "auto"
buckets = [32, 64]
max_length = 64
opt_batch_size = 16
base_precision = "fp16"
int8_attention = false
ndcg_above_chance = 0.02
search_budget = 0.25
[defaults.gates]
ndcg_drop = 0.005
top1_agreement = 0.85
kendall_tau = 0.85
max_score_shift = 1.0
[defaults.base_gates]
ndcg_drop = 0.002
top1_agreement = 0.98
kendall_tau = 0.97
max_score_shift = 0.1
[my_reranker]
checkpoint = "owner/name"
revision = "0123456789012345678901234567890123456789"
head = "sequence_classification"
segment_ids = false
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "rerankers.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_take_the_defaults_that_they_do_not_set(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    row = read_table(write(tmp_path, TABLE + "precision = 'int8'\n[my_reranker.gates]\nkendall_tau = 0.5\n"))[
        "my_reranker"
    ]
    assert (row.max_batch_size, row.precision, row.buckets) == (64, "int8", (32, 64))
    assert (row.gates.kendall_tau, row.gates.ndcg_drop) == (0.5, 0.005)
    assert (row.tokenizer, row.scorer) == ("my_reranker_tokenizer", "my_reranker_scorer")


@pytest.mark.parametrize(("max_length", "query_max"), [(512, 384), (1024, 768), (63, 47)])
def test_a_query_keeps_three_quarters_of_the_length(tmp_path: Path, max_length: int, query_max: int) -> None:
    text = TABLE + f"max_length = {max_length}\nbuckets = [{max_length}]\n"
    assert read_table(write(tmp_path, text))["my_reranker"].query_max(4) == query_max


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("max_len = 512", "unknown field max_len"),
        ("buckets = [64, 32]", "must rise"),
        ("buckets = [32, 32, 64]", "must rise"),
        ("buckets = [4, 64]", "from at least 8"),
        ("buckets = []", "must rise"),
        ("buckets = 64", "wrong type"),
        ("buckets = [32, 128]", "the last bucket is 128 but max_length is 64"),
        ("max_length = 512", "the last bucket is 64 but max_length is 512"),
        ("max_batch_size = 0", "use 1 to 1024"),
        ("max_batch_size = 2048", "use 1 to 1024"),
        ("precision = 'int4'", "precision is 'int4'; use one of"),
        ("[my_reranker.gates]\nndcg_drop = -2", "gates.ndcg_drop is -2"),
        ("[my_reranker.gates]\nndcg_drop = true", "gates.ndcg_drop is True"),
        ("[my_reranker.gates]\nndcg = 0.1", "unknown field gates.ndcg"),
        ("[Wrong-Name]\ncheckpoint = 'x'\nhead = 'bi_encoder'\nsegment_ids = true", "'Wrong-Name' cannot name"),
        ("[other]\nhead = 'bi_encoder'\nsegment_ids = true", "other: a field is missing"),
        ("[other]\ncheckpoint = 'x'\nhead = 'x'\nsegment_ids = true", "other: head is 'x'"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(TableError, match=says):
        read_table(write(tmp_path, f"{TABLE}{line}\n"))


@pytest.mark.parametrize("revision", ["main", "v1.0", "0123456", "0" * 39, "G" * 40])
def test_a_revision_that_is_no_commit_is_refused(tmp_path: Path, revision: str) -> None:
    text = TABLE.replace("0123456789012345678901234567890123456789", revision)
    with pytest.raises(TableError, match="is not a commit; give its 40 hexadecimal digits"):
        read_table(write(tmp_path, text))


def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="Cannot read the table"):
        read_table(tmp_path / "missing.toml")
    with pytest.raises(TableError, match="Cannot read the table"):
        read_table(write(tmp_path, "[unclosed"))
    with pytest.raises(TableError, match="a reranker is a"):
        read_table(write(tmp_path, "name = 3"))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(TableError, match="light_reranker, bge_reranker"):
        find_reranker("no_such_reranker")
