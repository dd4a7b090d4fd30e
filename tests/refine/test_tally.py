"""Sums of scores can be added up, also after they were looked at."""

from __future__ import annotations

import pytest
import torch

from deepmrf.data.colours import distinct_colours
from deepmrf.data.labels import LabelSet
from deepmrf.refine.examples import Example
from deepmrf.refine.tally import Tally, merged


class Stripes:
    """What a Tally asks of examples."""

    labels = LabelSet(("a", "b"), distinct_colours(2))

    def __init__(self, dims):
        self.dims = dims


@pytest.mark.parametrize("all_scores", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
def test_merged_scores_are_those_of_all_examples(dims, all_scores):
    random = torch.Generator().manual_seed(0)
    size = (5, 6, 7)[:dims]
    together, parts = Tally(Stripes(dims), all_scores), [Tally(Stripes(dims), all_scores) for _ in range(3)]
    for number in range(6):
        mask, labels = (torch.randint(0, 2, size, generator=random) for _ in range(2))
        example = Example(f"{number}", torch.zeros(2, *size), torch.zeros(3, *size), mask.to(torch.uint8))
        for tally in (together, parts[number % 3]):
            tally.add(example, labels)
    assert len({part.value() for part in parts}) > 1  # this must not change what follows
    assert merged(parts).value() == pytest.approx(together.value())
    assert merged(parts).scores().pixel_accuracy == pytest.approx(together.scores().pixel_accuracy)
    assert merged(parts).scores().images == 6


def test_agreement_is_one_for_truth_and_nothing_for_chance():
    random = torch.Generator().manual_seed(0)
    mask = torch.randint(0, 2, (64, 64), generator=random)
    for labels, low, high in ((mask, 0.9, 1.0), (torch.randint(0, 2, (64, 64), generator=random), -1, 0.0)):
        tally = Tally(Stripes(2))
        tally.add(Example("x", torch.zeros(2, 64, 64), torch.zeros(3, 64, 64), mask.to(torch.uint8)), labels)
        assert low <= tally.agreement() <= high
