"""A person's own `rewards.py`, or a folder of that name, stands beside their script and breaks nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

OURS = "from grpo.data.reward_files import load_rewards; ours = load_rewards(['policy', 'environment'])"
THEIRS = "from rewards import brevity; assert brevity(['ab']) == [-2.0]"
CHECK = """
import sys
from grpo.rewards import EnginePool, referee
assert [type(each).__name__ for each in ours.values()] == ["PolicyReward", "EnvironmentReward"]
assert type(ours["policy"]).__module__ == "grpo.rewards.policy"
assert EnginePool.__module__ == "grpo.rewards.engine"
name, function = next(iter(load_rewards(["rewards.py:brevity"]).items())) if FILE else ("brevity", brevity)
assert name == "brevity" and function(["abc"]) == [-3.0]
"""


@pytest.mark.parametrize("order", [(THEIRS, OURS), (OURS, THEIRS)], ids=["theirs first", "ours first"])
@pytest.mark.parametrize("is_file", [True, False], ids=["file", "folder"])
def test_a_users_own_rewards_and_ours_are_both_there(tmp_path, order, is_file):
    place = tmp_path / "rewards.py" if is_file else tmp_path / "rewards" / "__init__.py"
    place.parent.mkdir(exist_ok=True)
    place.write_text(
        "def brevity(completions, **columns):\n    return [-float(len(t)) for t in completions]\n"
    )
    script = "\n".join([*order, f"FILE = {is_file}", CHECK])
    (tmp_path / "train.py").write_text(script)
    where = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=where, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_where_nobody_has_taken_the_name_there_is_one_copy():
    import rewards.policy
    from grpo.rewards import PolicyReward

    assert PolicyReward is rewards.policy.PolicyReward
    assert Path(rewards.policy.__file__).parent == ROOT / "rewards"
