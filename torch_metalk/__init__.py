"""Metal kernels as PyTorch operators with gradients, for LoRA fine-tuning on a Mac.

`patch(model)` runs a Hugging Face model and its PEFT LoRA layers through them, `unpatch(model)` undoes it, `doctor()`
tells what is in use and why. `calibrate()` measures once how to share a product between CPU and GPU.
"""

from torch_metalk import ops
from torch_metalk._calibrate import calibrate
from torch_metalk._doctor import doctor
from torch_metalk._version import __version__
from torch_metalk.paged_cache import CacheFull, PagedCache
from torch_metalk.patching import PatchReport, patch, unpatch

__all__ = ["CacheFull", "PagedCache", "PatchReport", "__version__", "calibrate", "doctor", "ops", "patch", "unpatch"]
