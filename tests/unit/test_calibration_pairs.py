# SPDX-License-Identifier: Apache-2.0
"""Which pairs calibrate INT8: every length and script of a log, none twice, none that the result is judged by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from build_engines.calibrate import (
    MINIMUM_PAIRS,
    PAIRS_PER_BUCKET,
    CalibrationPair,
    choose_pairs,
    script_of,
    split,
    without_evaluation,
)
from build_engines.errors import PairsError
from build_engines.pairs import Candidates
from tests.checkpoints import CORPUS, row
from tests.unit.tiny_models import TinyModel, TinyModels

LATIN = [text for text in CORPUS if text.isascii()]
CHINESE = [text for text in CORPUS if script_of(text) == "CJK"]
RUSSIAN = "Привет, мир! Сколько стоит билет на поезд?"


def candidates(queries: int, documents: int, *, words: int = 20, seed: int = 0) -> list[Candidates]:
    """Return different English pairs of up to `words` words a document."""
    rng = np.random.default_rng(seed)
    vocabulary = " ".join(LATIN).split()

    def text(longest: int) -> str:
        return " ".join(rng.choice(vocabulary, rng.integers(3, longest + 1)))

    return [
        Candidates(f"{text(5)} {query}", tuple(f"{text(words)} {index}" for index in range(documents)))
        for query in range(queries)
    ]


def choose(model: TinyModel, given: Sequence[Candidates], **fields: Any) -> list[CalibrationPair]:
    reranker = row("tiny", model.checkpoint.folder, **fields) if fields else model.reranker
    return choose_pairs(reranker, model.encoder(), given, "log.jsonl")


def tokens(pair: CalibrationPair) -> list[int]:
    ids: list[int] = pair.arrays["input_ids"][0].tolist()
    return ids


def test_a_file_is_parted_one_to_three_by_its_queries() -> None:
    given = candidates(1000, 1)
    calibration, evaluation = split(given)
    assert 200 < len(calibration) < 300
    assert len(calibration) + len(evaluation) == 1000
    assert sorted([*calibration, *evaluation], key=given.index) == given
    assert split(given[::-1]) == (calibration[::-1], evaluation[::-1])


def test_a_query_that_is_repeated_stays_on_one_side() -> None:
    given = [Candidates(f"query {number % 40}", (f"document {number}",)) for number in range(400)]
    queries = [{c.query for c in part} for part in split(given)]
    assert not queries[0] & queries[1]
    assert all(queries)
    assert [Counter(c.query for c in part).most_common()[-1][1] for part in split(given)] == [10, 10]


def test_queries_that_the_result_is_judged_by_do_not_calibrate_it() -> None:
    given = candidates(10, 2)
    judged = [Candidates(given[3].query, ("another document",)), Candidates("unknown", ("text",))]
    assert without_evaluation(given, judged) == [*given[:3], *given[4:]]


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("what is a panda? 大熊猫", "LATIN"),
        ("大熊猫是中国特有的熊科动物 panda", "CJK"),
        (RUSSIAN, "CYRILLIC"),
        ("ひらがな", "HIRAGANA"),
        ("12 345, 67!", "NONE"),
        ("", "NONE"),
        ("a" * 200 + "я" * 5000, "LATIN"),
    ],
)
def test_a_text_is_of_the_script_of_most_of_its_letters(text: str, script: str) -> None:
    assert script_of(text) == script


def test_every_length_has_its_pairs_and_none_has_more_than_its_share(tiny: TinyModels) -> None:
    given = candidates(60, 10, words=120)
    chosen = choose(tiny.model("bert"), given)
    shares = Counter(pair.bucket for pair in chosen)
    assert set(shares) <= {32, 64, 128, 256, 512}
    assert len(shares) >= 4
    assert max(shares.values()) == PAIRS_PER_BUCKET
    assert sorted(shares.values())[-4:] == [PAIRS_PER_BUCKET] * 4
    for pair in chosen:
        length = len(tokens(pair))
        assert pair.bucket == min(bucket for bucket in (32, 64, 128, 256, 512) if bucket >= length)
        assert {name: array.shape for name, array in pair.arrays.items()} == dict.fromkeys(
            ("input_ids", "attention_mask", "token_type_ids"), (1, length)
        )
        assert pair.arrays["attention_mask"].all()


def test_a_pair_is_what_its_own_tokenizer_gives(tiny: TinyModels) -> None:
    model, given = tiny.model("xlm_roberta"), candidates(60, 10, words=80)
    known = {tuple(model.tokenizer(c.query, text)["input_ids"]) for c in given for text in c.documents}
    chosen = choose(model, given)
    assert len(chosen) >= MINIMUM_PAIRS
    assert {tuple(tokens(pair)) for pair in chosen} <= known
    assert all("token_type_ids" not in pair.arrays for pair in chosen)


def test_every_script_has_its_turn(tiny: TinyModels) -> None:
    given = candidates(40, 20, words=120)
    rare = [*CHINESE[:3], RUSSIAN, RUSSIAN + " Да!"]
    given.insert(20, Candidates("what is a panda?", tuple(rare)))
    chosen = choose(tiny.model("xlm_roberta"), given)
    scripts = Counter(pair.script for pair in chosen)
    assert (scripts["CJK"], scripts["CYRILLIC"]) == (3, 2)
    assert scripts["LATIN"] > 100


def test_scripts_of_a_length_share_it_equally(tiny: TinyModels) -> None:
    rng = np.random.default_rng(3)
    letters = {"CYRILLIC": "абвгдежзик", "CJK": "大熊猫是中国特有的"}
    words = {script: ["".join(rng.choice(list(known), 3)) for _ in range(60)] for script, known in letters.items()}
    given = candidates(60, 12, words=120)
    given += [Candidates("what is a panda?", tuple(found)) for found in words.values()]
    chosen = choose(tiny.model("bert"), given)
    share = Counter(pair.script for pair in chosen if pair.bucket == 32)
    assert sum(share.values()) == PAIRS_PER_BUCKET
    assert set(share) == {"LATIN", "CYRILLIC", "CJK"}
    assert max(share.values()) - min(share.values()) <= 1


def test_the_same_file_gives_the_same_pairs_and_not_its_first_ones(tiny: TinyModels) -> None:
    model, given = tiny.model("bert"), candidates(200, 3, words=120)
    first, second = (choose(model, given) for _ in range(2))
    assert [tokens(pair) for pair in first] == [tokens(pair) for pair in second]
    head = {tuple(model.tokenizer(c.query, text)["input_ids"]) for c in given[:50] for text in c.documents}
    # A quarter of the file is its first quarter.
    assert sum(tuple(tokens(pair)) in head for pair in first) < len(first) / 2


def test_too_few_pairs_are_refused_with_the_way_out(tiny: TinyModels) -> None:
    with pytest.raises(PairsError, match=r"tiny_bert: log\.jsonl gives 100 different pairs .* at least 128 are needed"):
        choose(tiny.model("bert"), candidates(100, 1, words=4))
    with pytest.raises(PairsError, match=r"build without INT8: --precision bf16\."):
        choose(tiny.model("bert"), candidates(3, 1), base_precision="bf16")


def test_one_length_may_give_all_pairs_where_the_others_are_missing(tiny: TinyModels) -> None:
    chosen = choose(tiny.model("bert"), candidates(150, 1, words=4))
    assert {pair.bucket for pair in chosen} == {32}
    assert len(chosen) == 128


def test_a_text_repeated_a_thousand_times_is_one_pair(tiny: TinyModels) -> None:
    given = [Candidates("what is a panda?", (CORPUS[0],) * 10)] * 100
    with pytest.raises(PairsError, match=r"gives 1 different pairs"):
        choose(tiny.model("bert"), given)
    chosen = choose(tiny.model("bert"), given + candidates(60, 10, words=120))
    panda = tiny.model("bert").tokenizer("what is a panda?", CORPUS[0])["input_ids"]
    assert sum(tokens(pair) == panda for pair in chosen) <= 1


def test_a_pair_that_cannot_be_encoded_is_named(tiny: TinyModels) -> None:
    with pytest.raises(PairsError, match=r"The query 'a query' cannot be used: "):
        choose(tiny.model("bert"), [Candidates("a query", ("x" * 2_000_000,))])
