"""The pinned model libraries work beside the pinned CPU build of torch."""

import os
import subprocess
import sys

import pytest

from tools.layout import ROOT

TIMM = """
import torch, timm
model = timm.create_model("test_vit", num_classes=3).eval()
assert model(torch.zeros(1, 3, *model.default_cfg["input_size"][1:])).shape == (1, 3)
"""
TRANSFORMERS = """
import torch, transformers
config = transformers.LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                  num_attention_heads=2, num_key_value_heads=2)
assert transformers.LlamaForCausalLM(config)(torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, 16)
"""


@pytest.mark.parametrize("program", [TIMM, TRANSFORMERS], ids=["timm", "transformers"])
def test_a_model_runs_on_the_cpu(program):
    """A tiny model of each library is built and run, without our device and without any download."""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1"}
    declare = "from tests.support import torchvision_schemas; torchvision_schemas.declare()"
    command = [sys.executable, "-c", f"{declare}\n{program}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
