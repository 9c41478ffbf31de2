"""Which aten ops have a kernel in PyTorch's MPS backend, as the PyTorch that is installed says itself."""

import importlib.util
import re
from pathlib import Path

# Of dense tensors, and of sparse ones (COO).
KEYS = ("MPS", "SparseMPS")

# Registered by hand in PyTorch's Objective-C++ sources (TORCH_LIBRARY_IMPL(aten, MPS, m)), so native_functions.yaml
# does not know of them.
REGISTERED_BY_HAND = (
    "_slow_conv2d_forward",
    "col2im",
    "embedding_renorm_",
    "linalg_svd",
    "linalg_svd.U",
    "upsample_nearest3d.vec",
)

_FUNCTION = re.compile(r"^- func: (?P<name>[\w.]+)\(")
_DELEGATE = re.compile(r"^  structured_delegate: (?P<name>[\w.]+)")
_DISPATCH = re.compile(r"^    (?P<keys>[\w, ]+):")


def real_kernels(key: str) -> list[str]:
    """Names such as `add.Tensor`, sorted, for one of the dispatch keys."""
    torchgen = importlib.util.find_spec("torchgen")
    yaml = Path(torchgen.submodule_search_locations[0]) / "packaged/ATen/native/native_functions.yaml"
    with_kernel, delegates, name = set(REGISTERED_BY_HAND if key == "MPS" else ()), {}, None
    for line in yaml.read_text().splitlines():
        if found := _FUNCTION.match(line):
            name = found["name"]
        elif found := _DELEGATE.match(line):
            delegates[name] = found["name"]
        elif (found := _DISPATCH.match(line)) and key in re.split(r",\s*", found["keys"]):
            with_kernel.add(name)
    with_kernel |= {name for name, delegate in delegates.items() if delegate in with_kernel}
    return sorted(with_kernel)
