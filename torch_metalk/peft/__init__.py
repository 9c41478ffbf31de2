"""PEFT LoRA layers on the fused path."""

from torch_metalk.peft.linear import MetalkLoraLinear, take_over, why_stock

__all__ = ["MetalkLoraLinear", "take_over", "why_stock"]
