"""Live objects to payload and back. No file is opened here."""

from safeckpt.state.baseline import Baseline, GuardResult, guard_from_record, guarded_in, is_mask
from safeckpt.state.component import Component
from safeckpt.state.fsdp import refuse_unreduced
from safeckpt.state.gradients import Gradients
from safeckpt.state.guard import Guard, check_gradients, find_nonfinite
from safeckpt.state.hidden import HiddenState
from safeckpt.state.loss import Loss
from safeckpt.state.loss_limit import LossLimit, Spike, TimesMedian
from safeckpt.state.mixture import Mixture
from safeckpt.state.module import persistent_tensors
from safeckpt.state.registry import register, uncaptured
from safeckpt.state.run_state import RESERVED_KEY, Plan, RunState, capture, plan
from safeckpt.state.staging import Staging
from safeckpt.state.stray import StrayOptimizers
from safeckpt.state.tree import copy_tree, to_cpu

__all__ = [
    "RESERVED_KEY",
    "Baseline",
    "Component",
    "Gradients",
    "Guard",
    "GuardResult",
    "HiddenState",
    "Loss",
    "LossLimit",
    "Mixture",
    "Plan",
    "RunState",
    "Spike",
    "Staging",
    "StrayOptimizers",
    "TimesMedian",
    "capture",
    "check_gradients",
    "copy_tree",
    "find_nonfinite",
    "guard_from_record",
    "guarded_in",
    "is_mask",
    "persistent_tensors",
    "plan",
    "refuse_unreduced",
    "register",
    "to_cpu",
    "uncaptured",
]
