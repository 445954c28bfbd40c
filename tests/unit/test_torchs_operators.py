"""Whose operators the message about a missing kernel speaks of: torch's own, or those of a library."""

from __future__ import annotations

import subprocess
import sys

from vram_guard.simulate.operators.stand_in import is_torchs_own

#: Prints the operators of a process that has imported parts of torch and nothing else.
NAMES = """
import torch, torch.distributed, torch.distributed.fsdp, torch.distributed.tensor, torch._dynamo
import torch._inductor.compile_fx, torch.ao.quantization.fx._decomposed, torch.nn.attention.flex_attention
print(*torch._C._dispatch_get_all_op_names())
"""


def test_no_operator_of_torch_asks_its_user_for_a_fake_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=True)
    names = [name.replace("::", ".") for name in done.stdout.split()]
    assert len([name for name in names if name.startswith("aten.")]) > 2000
    assert [name for name in names if not is_torchs_own(name)] == []


def test_operators_of_libraries_ask_for_it() -> None:
    for name in ("torchvision.nms.default", "torchao.quantize.default", "aten_like.add.default", "mine.prims.default"):
        assert not is_torchs_own(name), name
