"""Examples stay offline, and torchvision loads beside a CPU build of torch."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from tests.support import torchvision_schemas

torchvision_schemas.declare()
