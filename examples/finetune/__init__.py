"""The parts of ``examples/lora_finetune.py``."""


class UserError(Exception):
    """Something the person at the keyboard can put right; printed without a traceback."""
