import pytest

from msa_lab.budget import count_parameters, table
from msa_lab.config_io import to_dict
from msa_lab.demo import runs, tiny_runs
from msa_lab.runs import arm_folder
from msa_lab.study import check_folders


@pytest.mark.parametrize("study", [runs, tiny_runs])
def test_arms_are_matched_and_share_stem_tokens_and_schedule(study):
    stem, *arms = study(seeds=(0, 1))[:4]
    assert [arm.arm for arm in arms] == ["msa", "dense", "window"]
    assert all(arm.train.fork_from == arm_folder(stem) and arm.train.fork_step == stem.train.last_step for arm in arms)
    assert all(abs(row.percent) < 0.1 for row in table([stem, *arms]) if not row.is_stem)
    assert [count_parameters(arm.model).proxy > 0 for arm in arms] == [True, False, False]
    plain = [to_dict(arm) for arm in arms]
    for arm in plain:
        del arm["arm"], arm["model"]["attention"], arm["model"]["mlp_width"]
    assert plain[0] == plain[1] == plain[2]


def test_each_seed_has_a_study_of_its_own():
    study = runs(seeds=(0, 3))
    check_folders(study)
    assert [run.seed for run in study] == [0] * 4 + [3] * 4
    assert {arm_folder(run) for run in study[:4]} == {arm_folder(run) for run in study[4:]}


def test_the_demo_is_sparse_and_recorded_often_enough_to_say_something():
    msa = runs()[1]
    blocks = msa.data.context_length // msa.model.block_size
    assert 4 * msa.model.top_k_blocks <= blocks / 2
    assert msa.selections.records >= 10
    assert not msa.hides_sparsity
