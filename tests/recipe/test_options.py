"""Options of training that would train nothing are refused."""

import pytest

from bitcycle.recipe.options import TrainingOptions
from bitcycle.settings import SettingError


def test_a_norm_of_zero_is_refused():
    """It was once accepted, as if it meant no clipping, and made all gradients zero."""
    with pytest.raises(SettingError, match=r"clip_norm=0: makes all gradients zero.* null for no clipping"):
        TrainingOptions(clip_norm=0)
    assert TrainingOptions(clip_norm=None).clip_norm is None


def test_a_length_of_zero_is_refused():
    """It was once a run of one step."""
    with pytest.raises(SettingError, match=r"epochs=0: is no length of a run.* above 0"):
        TrainingOptions(steps=None, epochs=0)
    assert TrainingOptions(steps=None, epochs=0.5).total_steps(10) == 5
