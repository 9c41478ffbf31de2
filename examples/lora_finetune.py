"""Fine-tunes a language model with LoRA on torch_metalk's operators.

Without arguments: SmolLM2-135M-Instruct on the Python language reference, on mps if there is one, else on the CPU.
``--help`` lists the options; their names follow ``mlx_lm.lora``.
"""

import sys

from finetune import UserError
from finetune.config import parse


def main(argv: list[str] | None = None) -> int:
    try:
        config = parse(argv)
        from finetune.run import run  # here, so that --help and a misspelt option do not wait for torch

        return run(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted; nothing was saved after the last checkpoint.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
