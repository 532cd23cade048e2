"""Model tests import their support modules plainly, stay offline, and share a 2-core machine."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).parent))

from tests.support import torchvision_schemas

torchvision_schemas.declare()
