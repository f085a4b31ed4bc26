"""Every cost model by its name."""

from __future__ import annotations

from bitcycle.hardware.base import HardwareOptions
from bitcycle.hardware.bitfusion import BitFusion
from bitcycle.hardware.bitops import BitOps
from bitcycle.hardware.combined import AllHardware
from bitcycle.hardware.zc706 import Zc706
from bitcycle.settings import SettingError, nearest

HARDWARE: dict[str, type[HardwareOptions]] = {
    "bitops": BitOps,
    "bitfusion": BitFusion,
    "zc706": Zc706,
    "all": AllHardware,
}
"""Cost model name -> its options; `conf/hardware/NAME.yaml` is the same."""


def hardware_options(hardware: str | HardwareOptions) -> HardwareOptions:
    """The options of a cost model given by name, or the options themselves.

    Raises:
        SettingError (a ValueError): for an unknown name.
    """
    if isinstance(hardware, HardwareOptions):
        return hardware
    if hardware not in HARDWARE:
        raise SettingError("hardware", hardware, "is not a known cost model", nearest(hardware, HARDWARE))
    return HARDWARE[hardware]()
