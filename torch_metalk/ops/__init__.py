"""The operators: one file each, with schema, shape rule, eager twin, gradient and public function."""

from torch_metalk.ops._cpu_share import balanced_share
from torch_metalk.ops.attention import attention
from torch_metalk.ops.decode_attention import decode_attention
from torch_metalk.ops.geglu import geglu
from torch_metalk.ops.lora_linear import lora_linear
from torch_metalk.ops.lora_mlp import lora_mlp
from torch_metalk.ops.lora_qkv import lora_qkv
from torch_metalk.ops.matmul import matmul
from torch_metalk.ops.matmul_rows_split import matmul_rows_split
from torch_metalk.ops.paged_attention import paged_attention
from torch_metalk.ops.paged_cache_write import paged_cache_write
from torch_metalk.ops.rms_norm import rms_norm
from torch_metalk.ops.rope import rope, rope_qk
from torch_metalk.ops.rope_positions import rope_positions
from torch_metalk.ops.softmax import softmax
from torch_metalk.ops.swiglu import swiglu

__all__ = [
    "attention",
    "balanced_share",
    "decode_attention",
    "geglu",
    "lora_linear",
    "lora_mlp",
    "lora_qkv",
    "matmul",
    "matmul_rows_split",
    "paged_attention",
    "paged_cache_write",
    "rms_norm",
    "rope",
    "rope_positions",
    "rope_qk",
    "softmax",
    "swiglu",
]
