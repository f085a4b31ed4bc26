"""Train one network: `python train.py schedule=RTH model=resnet74`; `python train.py --help` explains every setting."""

import signal
import sys
from pathlib import Path
from types import FrameType


def stop_early(number: int, frame: FrameType | None) -> None:
    """Before and after the training loop, which has its own way to stop, nothing is lost by stopping at once."""
    print("interrupted: run the same command again", file=sys.stderr)
    sys.exit(75)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, stop_early)

    from bitcycle.command import main  # takes seconds, in which a cluster may already take the machine back

    sys.exit(main(conf=Path(__file__).parent.resolve() / "conf"))
