"""Settings from Python: types, words and bounds are checked as on the command line."""

from __future__ import annotations

import pytest

import bitcycle
from bitcycle.dataset.image_sets import Digits
from bitcycle.recipe.options import OptimizerOptions, TrainingOptions
from bitcycle.schedule import SCHEDULES
from bitcycle.settings import SettingError, nearest


def make(kind, **settings):
    return lambda: kind(**settings)


Cr = SCHEDULES["CR"].kind


@pytest.mark.parametrize(
    ("construct", "field", "remedy"),
    [
        (make(Cr, q_min=2.5), "q_min", "whole number"),
        (make(Cr, q_min="3"), "q_min", "whole number"),
        (make(Cr, q_min=None), "q_min", "whole number"),
        (make(Cr, q_min=True), "q_min", "whole number"),
        (make(TrainingOptions, steps=None, epochs=float("inf")), "epochs", "use a finite number"),
        (make(TrainingOptions, steps=2.5), "steps", "a whole number or null"),
        (make(TrainingOptions, deterministic="yes"), "deterministic", "true or false"),
        (make(OptimizerOptions, name=3), "name", "a word"),
        (make(OptimizerOptions, beta1=1), "beta1", "a value below 1"),
        (make(Digits, mean=0.5), "mean", "a list"),
        (make(Digits, mean=["a"]), "mean", "a list"),
    ],
)
def test_values_of_the_wrong_type_are_refused_by_name(construct, field, remedy):
    with pytest.raises(SettingError, match=remedy) as caught:
        construct()
    assert caught.value.field == field


def test_whole_numbers_are_numbers_and_null_is_allowed_where_declared():
    assert TrainingOptions(steps=None, epochs=3).epochs == 3
    assert TrainingOptions(threads=None).threads is None


@pytest.mark.parametrize("bits", [2.5, "3", None, True])
def test_bits_of_a_tensor_are_whole_numbers(bits):
    import torch

    with pytest.raises(SettingError, match="is not a whole number"):
        bitcycle.quantize(torch.ones(2, 2), bits)


def test_a_remedy_lists_no_thousand_names():
    """Those of a library that model.target names once filled pages."""
    names = [f"name{number}" for number in range(1000)]
    assert nearest("nam999", names) == "did you mean 'name999'? Known: 1000 names"
    assert nearest("?", names) == "use one of: 1000 names"
