# SPDX-License-Identifier: Apache-2.0
"""How much faster a passage is tokenised when its ids are in the token cache.

TRITON_RERANK_DATA=DIR python -m perf.token_cache light_reranker
"""

from __future__ import annotations

import argparse
import statistics
import time

from build_engines.configs import TOKEN_CACHE_BYTES, pinned_version
from build_engines.places import REPOSITORY
from build_engines.serving_code import pair_encoding
from build_engines.table import find_reranker
from perf.data import data_folder, read_set
from perf.machine import stamp


def main() -> None:
    """Tokenise each passage of a corpus as new, then again; print the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="light_reranker")
    parser.add_argument("--set", default="squad_dev")
    arguments = parser.parse_args()
    print(stamp())
    reranker = find_reranker(arguments.name)
    folder = REPOSITORY / reranker.tokenizer / str(pinned_version(REPOSITORY, reranker))
    encoder = pair_encoding.PairEncoder.load(folder, cache_bytes=TOKEN_CACHE_BYTES, max_text_bytes=1 << 20)
    passages = [text.encode() for text in read_set(data_folder() / arguments.set).corpus.values()]
    new_s: list[float] = []
    repeated_s: list[float] = []
    for passage in passages:
        for times in (new_s, repeated_s):
            started = time.perf_counter()
            encoder.text_ids(encoder.request_texts([], [passage]))
            times.append(time.perf_counter() - started)
    new, repeated = (statistics.median(times) * 1e6 for times in (new_s, repeated_s))
    print(f"{len(passages)} passages: new {new:.1f} us, repeated {repeated:.1f} us, ratio {new / repeated:.1f}")


if __name__ == "__main__":
    main()
