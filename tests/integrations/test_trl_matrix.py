"""A trainer of TRL that is killed is, resumed, the same run."""

from __future__ import annotations

import pytest

from tests import children
from tests.integrations import harness

pytest.importorskip("trl", reason="needs trl, peft and datasets")

from tests.integrations.trl_runs import train

children.preload("tests.integrations.trl_runs")

pytestmark = pytest.mark.slow

MODES = {
    "SFT": {},
    "SFT with LoRA": {"lora": True},
    "DPO": {"kind": "dpo"},
    "DPO, reference follows": {
        "kind": "dpo", "arguments": {"sync_ref_model": True, "ref_model_sync_steps": 3},
    },
    "DPO with LoRA": {"kind": "dpo", "lora": True},
}  # fmt: skip


@pytest.mark.parametrize("name", ["middle of an epoch", "last batch"])
@pytest.mark.parametrize("mode", MODES)
def test_resume_is_the_same_run(tmp_path, straights, name, mode):
    """Also with adapters, and with a reference model that follows the trained one."""
    harness.assert_exact(train, tmp_path, harness.PLACES[name], straight=straights(mode=mode), **MODES[mode])
