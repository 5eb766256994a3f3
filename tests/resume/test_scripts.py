"""Scripts as public repositories have them: each is killed at random places, and is the run that nothing stopped."""

import os

import pytest

from tests.resume.kills import assert_killed_run_is_the_straight_one
from tests.resume.scripts import control, generative, images, language, plain, supervised

FAST = [images.train_with_recipe]
SLOW = [
    control.train_dqn,
    images.train_keeping_the_best_model,
    language.train_nano_gpt,
    language.train_low_rank,
    language.train_low_rank_alone,
    generative.train_gan,
    generative.train_vae,
    generative.train_diffusion,
    control.train_ppo,
    plain.train_sines,
    plain.train_graph,
    generative.train_vae_annealing,
    control.train_sac,
    supervised.train_word_language_model,
    supervised.train_siamese,
    supervised.train_with_plateau,
    supervised.train_fine_tuning,
    supervised.train_averaging_at_the_end,
    supervised.train_contrastive,
    supervised.train_distilling,
    supervised.train_by_curriculum,
]
SEED = int(os.environ.get("SAFECKPT_KILLS_SEED", "0"))  # another one dies at other places


@pytest.mark.parametrize(
    "script", [*FAST, *(pytest.param(script, marks=pytest.mark.slow) for script in SLOW)], ids=lambda one: one.__name__
)
def test_public_script_killed_at_random_places_ends_bit_equal(script, memory_path):
    """Every loss, the result and the last checkpoint of a run that was killed are those of the straight one."""
    assert assert_killed_run_is_the_straight_one(script, memory_path, SEED) >= 2
