# SPDX-License-Identifier: Apache-2.0
"""The real decoders, exported and tokenised by this project, score as Transformers does with the whole model.

They run like the tests beside them: with TRITON_RERANK_CHECKPOINTS=DIR, or TRITON_RERANK_HUB=1 (1 to 5 GB each; a build
needs four times that in memory).
"""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from build_engines.fetch import fetch
from tests.hub.test_published_scores import PANDA, Exported, exported

__all__ = ["exported"]  # the fixture

PAIRS = [
    ("what is panda?", PANDA),
    ("what is panda?", "hi"),
    ("What is the capital of China?", "The capital of China is Beijing."),
    ("What is the capital of China?", "Gravity is a force that attracts two bodies towards each other."),
]


@pytest.mark.parametrize("exported", ["qwen3_reranker", "deepseek_reranker", "bge_reranker_gemma"], indirect=True)
def test_real_decoders_score_as_the_whole_model_does(exported: Exported) -> None:
    folder, prompt = fetch(exported.reranker).folder, exported.reranker.prompt
    assert prompt is not None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    yes, no = (tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt.yes, prompt.no))
    found, expected = exported.score(PAIRS), []
    for query, document in PAIRS:
        # FlagEmbedding tokenises the parts of Gemma's prompt apart; the others' are tokenised whole.
        parts = [*prompt.prefix, f"A: {query}", *prompt.middle, f"B: {document}", *prompt.suffix]
        texts = parts if prompt.apart else [prompt.whole(query, document)]
        ids = [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False).ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        expected.append(float(logits[yes[0]] - (logits[no[0]] if no else 0)))
    assert found == pytest.approx(expected, rel=0, abs=1e-3)
    if exported.reranker.name != "deepseek_reranker":  # which was never trained to rank
        assert expected[0] > expected[1]
        assert expected[2] > expected[3]
