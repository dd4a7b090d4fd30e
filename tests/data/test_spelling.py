"""Which word was meant."""

from __future__ import annotations

import pytest

from deepmrf.data.spelling import did_you_mean


@pytest.mark.parametrize(
    "word, known, question",
    [
        ("windw", ["window", "width"], " (did you mean window?)"),
        ("animal", {"street": 1, "animals": 2}, " (did you mean animals?)"),
        ("depth", ["width", "labels"], ""),
        ("anything", [], ""),
        ("", ["window"], ""),
    ],
)
def test_a_word_much_like_a_known_one_is_asked_for(word, known, question):
    assert did_you_mean(word, known) == question
