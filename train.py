"""Train one network: `python train.py schedule=RTH model=resnet74`; `python train.py --help` explains the settings."""

import sys
from pathlib import Path

from bitcycle.cli import main

if __name__ == "__main__":
    sys.exit(main(conf=Path(__file__).parent.resolve() / "conf"))
